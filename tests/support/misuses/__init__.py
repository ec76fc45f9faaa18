"""Small programs that a static step cannot be, each with its corrected form.

``table`` lists them by group; ``program`` makes modules of them and runs them; ``elsewhere`` asks
plain PyTorch, ``torch.compile(fullgraph=True)`` and JAX what they say; ``document`` writes
``docs/errors.md`` from all that.
"""
