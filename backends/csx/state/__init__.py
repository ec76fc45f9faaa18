"""What persists from one step to the next.

storage            the tensors that modules and optimizers hold, in place
optimizer_init     the state of optimizers before the first step
first_update       state that only the first gradient can make
conditional_step   steps of an optimizer that may not count
gradients          p.grad in a trace; kept_gradients: where they are between steps;
                   carried_gradients: used one step later; dropped_gradient: what stands in p.grad
                   where no program keeps it
places             places on the host, and what goes there after every step
fake_swap          fakes behind the user's own tensors
set_data           ``p.data = value``
"""
