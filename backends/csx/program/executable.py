"""One entry point of a program, loaded and bound to the tensors that it works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fulgurite.backends.csx.capture.batch_changes import BatchChanges
from fulgurite.backends.csx.capture.captured import Captured
from fulgurite.backends.csx.capture.host_calls import ClosureCall
from fulgurite.backends.csx.capture.logs import Accumulator, LogCall
from fulgurite.backends.csx.capture.outputs import Outputs, builder
from fulgurite.backends.csx.compile.fabric import HostFabric, Loaded
from fulgurite.backends.csx.contract.constants import Source
from fulgurite.backends.csx.diagnostics.errors import UnsupportedInput
from fulgurite.backends.csx.graph.graph import Kind
from fulgurite.backends.csx.state.binding import Binding
from fulgurite.backends.csx.state.kept_gradients import Unkept, held_gradients


class Executable:
    """One entry point, loaded and bound to the tensors it works on."""

    def __init__(
        self,
        captured: Captured,
        loaded: Loaded,
        fabric: HostFabric,
        gradients: dict[str, Tensor],
        global_step: Callable[[], Tensor],
    ) -> None:
        graph, self._global_step = captured.graph, global_step
        self.counted = captured.counted
        self._fabric, self._loaded = fabric, loaded
        state = [item for item in graph.inputs if item.kind is Kind.STATE]
        inputs_of_state = tuple(captured.state[item.index] for item in state)
        self._binding = Binding(inputs_of_state, captured.trained)
        self._gradients = held_gradients(graph, captured.gradients, gradients)
        self._unkept = Unkept(graph, captured.gradients)
        self.tells_unkept = True  # after the next run
        self._takes_numbers = any(item.kind is Kind.NUMBERS for item in graph.inputs)
        self._takes_steps = any(item.kind is Kind.STEPS for item in graph.inputs)
        self._constants_read = [i.index for i in graph.inputs if i.kind is Kind.CONSTANT]
        self._batch = [item.index for item in graph.inputs if item.kind is Kind.BATCH]
        offset = len(graph.inputs) - len(self._batch)
        written = graph.written()
        self._written = [i for k, i in enumerate(self._batch) if offset + k in written]
        self._names = [leaf.name for leaf in captured.batch.tensor_leaves()]
        self._takes_all = self._batch == list(range(len(self._names)))
        self.recording = captured.recording
        self.follow(captured.constants, captured.outputs)

    def follow(self, constants: Sequence[Source | Accumulator], outputs: Outputs) -> None:
        """Take constants from these places, and put the results into those."""
        self._constants = [constants[i] for i in self._constants_read]
        self._result = builder(outputs)
        self.logs = [call for call in outputs.calls if isinstance(call, LogCall)]
        self.passed = outputs.passed
        changes = [call for call in outputs.calls if isinstance(call, BatchChanges)]
        self.added = [place for change in changes for place in change.added]
        self.runs_users_code = any(isinstance(call, ClosureCall) for call in outputs.calls)

    @property
    def writes_batch(self) -> bool:
        """Whether the step changes a tensor of the batch in place."""
        return bool(self._written)

    def check(self) -> None:
        """Verify the state (see ``Binding.check``)."""
        self._binding.check()

    def run(
        self,
        vector: Tensor | None,
        batch: list[Tensor],
        given: list[Tensor],
        passed: Sequence[Any] = (),
    ) -> Any:
        """Run once.

        Args:
            vector: the numbers, float64.
            batch: its tensors in the traced layout.
            given: its tensors as they came.
            passed: what the step only passes on.
        """
        inputs = self._binding.inputs()
        gradients = [] if self._gradients is None else self._gradients.before()
        inputs += gradients
        if self._takes_numbers:
            assert vector is not None
            inputs.append(vector)
        if self._takes_steps:
            inputs.append(self._global_step())
        if self._constants:
            inputs += [source.now() for source in self._constants]
        if self._written:
            self._check_writes(batch)
        storages = self._binding.storages
        if not storages.isdisjoint([t.untyped_storage().data_ptr() for t in batch]):
            batch = [t.clone() if t.untyped_storage().data_ptr() in storages else t for t in batch]
        inputs += batch if self._takes_all else [batch[i] for i in self._batch]
        outputs = self._fabric.run(self._loaded, inputs)
        if self._gradients is not None:
            self._gradients.after(gradients)
        if self.tells_unkept:
            self.tells_unkept = False
            self._unkept.put()
        for i in self._written:
            if given[i] is not batch[i]:
                given[i].copy_(batch[i])
        return self._result([*outputs, *passed] if passed else outputs)

    def _check_writes(self, batch: list[Tensor]) -> None:
        pointers = [tensor.untyped_storage().data_ptr() for tensor in batch]
        for i in self._written:
            others = [j for j, pointer in enumerate(pointers) if pointer == pointers[i] and j != i]
            if others:
                raise UnsupportedInput(
                    f"The step changes {self._names[i]} in place, and {self._names[others[0]]}"
                    " shares its memory.",
                    remedy=f"work on a copy: {self._names[i]}.clone(), in the step or the dataset",
                )
