"""What persists from one step to the next: the tensors that a program updates in place.

Tracing (capture), numbers of param groups (hyperparams), rules (contract), programs and plugins
import from here; this room imports from ``diagnostics`` and ``graph`` alone.

places             one place on the host that holds a tensor, and what goes where after a step
storage            the tensors that modules and optimizers hold: which inputs of a program they are
binding            the tensors that are in these places when a program runs
python_objects     whose class it is, what is in it, and how that is remembered and put back
optimizer_init     the state of optimizers before the first step
optimizer_trial    a step of one on trial: what it makes and does
optimizer_hooks    what is called before and after its steps
held_states        whether optimizers' state still is in the same dicts
first_update       state that only the first gradient can make
conditional_step   steps of an optimizer that may not count
gradients          p.grad in a trace; kept_gradients: where they are between steps;
                   carried_gradients: used one step later; dropped_gradient: what stands in p.grad
                   where no program keeps it
reduction          gradients of several processes: their mean
fake_swap          fakes behind the user's own tensors
set_data           ``p.data = value``
"""
