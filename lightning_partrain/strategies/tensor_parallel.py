"""Strategies whose ranks may hold the layers of a model together."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_partrain.parallel.pipeline.schedule import Schedule
from lightning_partrain.parallel.placement import Fused
from lightning_partrain.parallel.tensor.plan import Plan, check_plan, regions, resolve, together
from lightning_partrain.parallel.tensor.tensor import TensorParallel
from lightning_partrain.strategies.checkpoints import Format
from lightning_partrain.strategies.initial_values import Pretrained
from lightning_partrain.strategies.pipelined import PipelinedStrategy

#: What torch says where a parameter that is cut meets a tensor outside of its layer.
_MIXED = "mixed torch.Tensor and DTensor"


class TensorParallelStrategy(PipelinedStrategy):
    """Cuts layers after the model is cut into stages and before it is sharded, and makes them whole at the end.

    With one tensor-parallel rank it is a :class:`PipelinedStrategy`.

    Args:
        tensor_parallel_plan: see :class:`Hybrid3DStrategy`.
        num_microbatches, schedule, pipeline_split: see :class:`PipelinedStrategy`.
        process_group_backend, timeout: see :class:`RankStrategy`.
        checkpoint_format, async_save: see :class:`CheckpointStrategy`.
        load_pretrained: see :class:`Hybrid3DStrategy`.
    """

    def __init__(
        self,
        tensor_parallel_plan: Plan,
        num_microbatches: int | Literal["auto"],
        schedule: Schedule,
        pipeline_split: Literal["auto"] | dict[str, Any],
        process_group_backend: str | None,
        timeout: timedelta | float,
        checkpoint_format: Format,
        async_save: bool,
        load_pretrained: Pretrained,
    ) -> None:
        super().__init__(
            num_microbatches,
            schedule,
            pipeline_split,
            process_group_backend,
            timeout,
            checkpoint_format,
            async_save,
            load_pretrained,
        )
        check_plan(tensor_parallel_plan)
        self.tensor_parallel_plan = tensor_parallel_plan
        self.tensor_parallel: TensorParallel | None = None
        self._fused_names: dict[str, Fused] = {}  # also after the run: optimizers keep their part of the state

    @property
    def _tensor_ranks(self) -> int:
        assert self.mesh is not None
        return self.mesh.sizes.tp

    def audit(self, trainer: Any) -> None:
        super().audit(trainer)
        per_node = self.world_size // self.num_nodes
        if self._tensor_ranks > per_node:
            rank_zero_warn(
                f"tensor_parallel_size={self._tensor_ranks} spans several nodes, which have {per_node} ranks each. Tensor-parallel ranks exchange "
                f"activations in every layer: up to {per_node} of them and more pipeline stages are faster."
            )

    def cut_layers(self) -> None:
        self._fused_names = {}
        if self._tensor_ranks == 1:
            return
        assert self.mesh is not None and self.lightning_module is not None
        absent = self.pipeline.absent if self.pipeline is not None else frozenset[Tensor]()
        self.tensor_parallel = TensorParallel(self.lightning_module, self.mesh, self.tensor_parallel_plan, absent)
        self._fused_names = self.tensor_parallel.fused

    def layers_together(self) -> list[list[str]]:
        assert self.lightning_module is not None
        root = self.lightning_module
        if self._tensor_ranks == 1 or any(isinstance(p, DTensor) for p in root.parameters()):
            return []
        return together(root, regions(root, resolve(root, self.tensor_parallel_plan, self._tensor_ranks)))

    def fused(self, param: Tensor) -> Fused | None:
        return self._fused_names.get(self.name_of(param))

    # -- the step --------------------------------------------------------------------------------------------------------

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        if self.tensor_parallel is None:
            return super()._train(*args, **kwargs)
        self.tensor_parallel.begin_step()
        try:
            output = super()._train(*args, **kwargs)
        except RuntimeError as error:
            raise self._explained(error) from error
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, DTensor):
            raise ValueError(
                "The loss has a term in it of a parameter that tensor_parallel_plan cuts, such as weight.pow(2).sum(), which torch cannot add "
                "to others. Use weight_decay of the optimizer, add `term.full_tensor()`, or keep the layer whole with 'replicate' in the plan."
            )
        self.tensor_parallel.check_step(loss if isinstance(loss, Tensor) else None)
        return output

    def _evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._evaluate(step, *args, **kwargs)
        except RuntimeError as error:
            raise self._explained(error) from error

    @staticmethod
    def _explained(error: RuntimeError) -> RuntimeError:
        if _MIXED not in str(error):
            raise error
        return RuntimeError(
            "A parameter that tensor_parallel_plan cuts is used outside of its layer's forward, where its other parts are missing. Keep the "
            f"layer whole, as with tensor_parallel_plan={{'*': 'auto', 'model.embed': 'replicate'}}. torch says: {error}"
        )

    def _complete_gradients(self, last_of_window: bool) -> None:
        super()._complete_gradients(last_of_window)
        if self.tensor_parallel is not None and last_of_window:
            assert self.model_parallel is not None
            self.tensor_parallel.check_gradients(self.model_parallel.named_parameters())

    # -- the end ---------------------------------------------------------------------------------------------------------

    def join(self, whole: bool) -> None:
        if self.tensor_parallel is not None:
            self.tensor_parallel.release(whole)
        super().join(whole)

    def teardown(self) -> None:
        super().teardown()
        self.tensor_parallel = None
