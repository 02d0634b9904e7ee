"""Cuts the layers of a model over the tensor-parallel ranks, and makes it whole again."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_partrain.mesh import ParallelMesh
from lightning_partrain.parallel.hollow import hollow, is_hollow, make_hollow
from lightning_partrain.parallel.placement import Fused, whole
from lightning_partrain.parallel.tensor.alike import check_gradients, check_loss
from lightning_partrain.parallel.tensor.attributes import replace, restore
from lightning_partrain.parallel.tensor.check import RegionCheck
from lightning_partrain.parallel.tensor.plan import Layer, Plan, cut_parameters, regions, resolve
from lightning_partrain.parallel.tensor.streams import RankStream
from lightning_partrain.parallel.tensor.styles import CutParameter, Style

#: Attributes in which attention modules keep the number of heads, and the width of all of them, for the shapes of their views.
HEADS_AND_WIDTHS = (
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "n_heads",
    "heads",
    "split_size",
    "all_head_size",
    "inner_dim",
    "embed_dim",
)


class CutForward:
    """The forward of a cut layer. A copy of the layer gets one of its own."""

    def __init__(self, style: Style, module: nn.Module, group: dist.ProcessGroup, stream: RankStream) -> None:
        self.style, self.module, self.group, self.stream = style, module, group, stream
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        assert self.style.forward is not None
        if not self.module.training:
            return self.style.forward(self.module, self.group, *args, **kwargs)
        if self.style.draws:
            self.stream.enter()
            try:  # a checkpoint that has computed enough again leaves by an exception
                return self.style.forward(self.module, self.group, *args, **kwargs)
            finally:
                self.stream.leave()
        if self.style.closes:
            self.stream.leave()
        output = self.style.forward(self.module, self.group, *args, **kwargs)
        if self.style.opens:
            self.stream.enter()
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> CutForward:
        return CutForward(self.style, copy.deepcopy(self.module, memo), self.group, self.stream)


class TensorParallel:
    """The cut layers of ``root``, whose parameters are DTensors on the tensor-parallel mesh from now on.

    A module whose ``configure_model`` has made DTensors already keeps them, and nothing else is cut.

    Args:
        root: the LightningModule, with whole parameters that are equal on all ranks.
        mesh: the mesh of the run.
        plan: which layers are cut, and how.
        absent: parameters that live on other pipeline stages.

    Raises:
        ValueError: for a plan that cannot be; see :func:`resolve` and :func:`regions`.
    """

    def __init__(
        self, root: nn.Module, mesh: ParallelMesh, plan: Plan, absent: Collection[Tensor] = frozenset()
    ) -> None:
        self.root, self.mesh, self.group = root, mesh, mesh.group("tp")
        self.fused: dict[str, Fused] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter, str]] = []
        self._checks: list[RegionCheck] = []
        self._handles: list[Any] = []
        self._steps = 0
        self._stream = RankStream(self.group.rank())
        if any(isinstance(p, DTensor) for p in root.parameters()):
            if plan != "auto":
                raise ValueError(
                    f"configure_model of {type(root).__name__} has made tensor-parallel parameters already, so tensor_parallel_plan cannot "
                    "cut it again. Leave the plan at 'auto', or leave configure_model without parallelize_module."
                )
            return
        layers = resolve(root, plan, mesh.size("tp"))
        places = regions(root, layers)
        present = [layer for layer in layers if not self._is_absent(layer, absent)]
        self._tell(layers)
        self._cut(present)
        fused = {(m, key): self.fused[path] for m, key, _, path in self._places if path in self.fused}
        for name, inside in places.items():
            here = [layer for layer in inside if layer in present]
            region = root.get_submodule(name)
            if not any(p in absent for p in region.parameters()):  # a row of pairs may be on several stages
                self._checks.append(RegionCheck(name, region, here, fused, self.group))

    @staticmethod
    def _is_absent(layer: Layer, absent: Collection[Tensor]) -> bool:
        return any(p in absent for p in layer.module.parameters())

    # -- cut -------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _cut(self, layers: list[Layer]) -> None:
        cuts: dict[Tensor, CutParameter] = {}
        for layer in layers:
            for cut in layer.style.cut(layer.module):
                cuts.setdefault(getattr(cut.owner, cut.key), cut)
        new: dict[Tensor, nn.Parameter] = {}
        for name, module in self.root.named_modules():
            for key, param in module._parameters.items():
                if param is None or param not in cuts:
                    continue
                path = f"{name}.{key}" if name else key
                if param not in new:
                    new[param] = self._cut_parameter(path, param, cuts[param])
                if cuts[param].parts > 1:
                    self.fused[path] = self._fused_of(param, cuts[param])
                self._places.append((module, key, param, path))
        for module, key, param, _ in self._places:
            module._parameters[key] = new[param]
        for param in new:  # whoever still holds it gets no numbers
            make_hollow(param)
            param.grad = None
        for layer in layers:
            self._install(layer)
        for module in self.root.modules():
            if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
                replace(module, "use_nested_tensor", False)

    def _fused_of(self, param: Tensor, cut: CutParameter) -> Fused:
        return Fused(cut.dim, (param.shape[cut.dim] // cut.parts,) * cut.parts, self.group.size())

    def _cut_parameter(self, name: str, param: nn.Parameter, cut: CutParameter) -> nn.Parameter:
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name!r} has a hook on its gradient, of which each rank would see a part only. Use on_before_optimizer_step, or give its "
                "module the style 'replicate' in tensor_parallel_plan."
            )
        if is_hollow(param):
            part = torch.empty(param.shape, device="meta").chunk(self.group.size(), cut.dim)[self.group.rank()]
            local = hollow(part.shape, param.dtype, param.device)
        else:
            fused = self._fused_of(param, cut) if cut.parts > 1 else None
            ordered = fused.by_rank(param) if fused is not None else param.detach()
            local = ordered.chunk(self.group.size(), cut.dim)[self.group.rank()].clone(
                memory_format=torch.contiguous_format
            )
        shape, stride = param.shape, torch.empty(param.shape, device="meta").stride()
        tensor = DTensor.from_local(
            local, self.mesh.device_mesh["tp"], [Shard(cut.dim)], run_check=False, shape=shape, stride=stride
        )
        return nn.Parameter(tensor, param.requires_grad)

    def _install(self, layer: Layer) -> None:
        module = layer.module
        replace(module, "forward", CutForward(layer.style, module, self.group, self._stream))
        if layer.style.name == "heads":
            # any hook keeps the layers of torch.nn off their fused path, which takes the weights
            self._handles.append(module.register_forward_hook(lambda *_: None))
        if layer.style.opens:
            self._count_heads(self.root.get_submodule(layer.name.rpartition(".")[0]))

    def _count_heads(self, attention: nn.Module) -> None:
        """Let attention's code, which may know how many heads there are, know how many are here."""
        ranks = self.group.size()
        for key in HEADS_AND_WIDTHS:
            value = vars(attention).get(key)
            if isinstance(value, int) and value % ranks == 0:
                replace(attention, key, value // ranks)

    def _tell(self, layers: list[Layer]) -> None:
        counts: dict[str, int] = {}
        for layer in layers:
            counts[layer.style.name] = counts.get(layer.style.name, 0) + 1
        numbers = sum(p.numel() for p in cut_parameters(layers)), sum(p.numel() for p in self.root.parameters())
        rank_zero_info(
            f"Tensor parallel over {self.group.size()} ranks: {numbers[0] / max(1, numbers[1]):.0%} of the parameters are cut ("
            + ", ".join(f"{number} layers {style}" for style, number in counts.items())
            + ")."
        )

    # -- the step --------------------------------------------------------------------------------------------------------

    def is_time_to_look(self) -> bool:
        """At steps 1, 2, 4, 8, ...: a layer may begin at zero, and a step may depend on how far training is."""
        return self._steps & (self._steps - 1) == 0

    def begin_step(self) -> None:
        """Before each training step."""
        self._steps += 1
        self._stream.forget()
        if self._steps > 1 and self.is_time_to_look():
            for check in self._checks:
                check.arm()

    def check_step(self, loss: Tensor | None) -> None:
        """After a training step. Collective over the tensor-parallel ranks."""
        if not self.is_time_to_look():
            return
        if loss is not None:
            check_loss(loss, self.group)
        for check in self._checks:
            check.disarm()
            called = [layer.name for layer in check.layers if getattr(layer.module.forward, "called", False)]
            if called and not check.seen and check.name:
                raise ValueError(
                    f"{called[0]!r} is cut together with other layers of {check.name!r}, but is not called by that module's forward, so that it "
                    "cannot be seen whether what happens in between is right. Keep them whole: tensor_parallel_plan={'*': 'auto', "
                    f"'{check.name}.*': 'replicate'}}, or give them 'colwise_gather_output' and 'rowwise_split_input'."
                )

    def check_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        """After the backward pass of a window. Collective over the tensor-parallel ranks."""
        if self.is_time_to_look():
            check_gradients(parameters, self.group)

    # -- whole again -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def release(self, as_whole: bool) -> None:
        """Give the model the parameters that it had: whole on every rank, which is collective over the tensor-parallel ranks, or hollow."""
        for check in self._checks:
            check.disarm()
        for handle in self._handles:
            handle.remove()
        done = set()
        for module, key, original, path in self._places:
            param = module._parameters[key]
            if original not in done:
                done.add(original)
                assert isinstance(param, DTensor)
                original.data = (
                    whole(param, self.fused.get(path)) if as_whole else hollow(param.shape, param.dtype, param.device)
                )
                original.requires_grad_(param.requires_grad)
            module._parameters[key] = original
        for module in self.root.modules():
            restore(module)
        self._places.clear()
