"""What is said of a word on the command line that is no command and no option of it."""

from __future__ import annotations

from collections.abc import Iterable

from fulgurite.config.document.problems import nearest

WRITTEN = {
    "--set trainer.init.loop.num_epochs=N": ("epochs", "max_epochs", "num_epochs", "n_epochs"),
    "--set trainer.init.loop.max_steps=N": ("steps", "max_steps", "num_steps"),
    "--set trainer.init.optimizer.NAME.lr=X": ("lr", "learning_rate"),
    "--set trainer.fit.train_dataloader.batch_size=N": ("batch_size", "bs"),
    "--set trainer.init.seed=N": ("seed",),
    "--set trainer.init.precision=NAME": ("precision", "amp", "fp16", "bf16"),
    "--set trainer.init.devices=N": ("devices", "num_devices", "gpus", "nproc"),
    "--device CSX": ("csx",),
    "--device GPU": ("gpu", "cuda", "accelerator"),
    "--device CPU": ("cpu",),
    "--model_dir DIR": ("output_dir", "out_dir", "save_dir", "log_dir", "default_root_dir"),
    "--ckpt_path FILE": ("resume", "checkpoint", "ckpt", "resume_from_checkpoint"),
}
"""What to write to a command that runs a file: options that other trainers have for it."""


def unknown_command(name: str, known: Iterable[str]) -> str:
    """What is said of a command that there is none of."""
    near = nearest(name, known) or f" There are {', '.join(known)}."
    if name.endswith((".yaml", ".yml")):
        near = f" A parameter file comes after one: fulgurite fit {name}."
    return f"there is no command {name!r}.{near}"


def unknown(words: list[str], known: Iterable[str], is_run: bool) -> str:
    """What is said of words that a command does not take.

    Args:
        words: all of them; an option's value is one.
        known: the command's options.
        is_run: whether it runs a parameter file.
    """
    options = [word for word in words if word.startswith("-")]
    if not options:
        return f"it takes no {' '.join(map(repr, words))}."
    told = (_unknown_option(option.partition("=")[0], known, is_run) for option in options)
    return "\n".join(told)


def _unknown_option(option: str, known: Iterable[str], is_run: bool) -> str:
    name = option.lstrip("-").replace("-", "_").lower()
    said = f"there is no option {option}."
    for written, others in WRITTEN.items() if is_run else ():
        if name in others:
            return f"{said} Write {written}."
    if near := nearest(f"--{name}", known):
        return said + near
    other = " A key of the file is set by --set a.b.c=value."
    return said + (other if is_run else "")
