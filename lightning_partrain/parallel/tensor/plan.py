"""From ``tensor_parallel_plan`` to the layers of a model and how each is cut, or an error that names what would do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from lightning_partrain.parallel.names import matching
from lightning_partrain.parallel.tensor.auto import auto_styles
from lightning_partrain.parallel.tensor.styles import ALIASES, STYLES, CutParameter, Style

Plan = Literal["auto"] | Mapping[str, str]


@dataclass(frozen=True)
class Layer:
    """A module of the model that is cut, or takes part in a cut."""

    name: str
    module: nn.Module
    style: Style


def check_plan(plan: Any) -> None:
    """Raise for what can be no plan of any model.

    Raises:
        ValueError: for another type, or a style that does not exist; names the nearest.
    """
    if plan == "auto":
        return
    if not isinstance(plan, Mapping) or not plan or not all(isinstance(k, str) for k in plan):
        raise ValueError(
            "tensor_parallel_plan must be 'auto' or a mapping from names of modules, with * for any part, to styles, such as "
            f"{{'layers.*.up_proj': 'colwise', 'layers.*.down_proj': 'rowwise'}}, not {plan!r}."
        )
    for pattern, style in plan.items():
        if not isinstance(style, str):
            raise ValueError(
                f"tensor_parallel_plan gives {pattern!r} the style {style!r}; a style is one of {', '.join(STYLES)}."
            )
        if style not in STYLES and style not in ALIASES and style != "auto":
            known = [*STYLES, *ALIASES, "auto"]
            near = difflib.get_close_matches(str(style), known, 3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ValueError(
                f"tensor_parallel_plan gives {pattern!r} the style {style!r}, which does not exist.{hint} Styles: {', '.join(known)}."
            )


def resolve(root: nn.Module, plan: Plan, ranks: int) -> list[Layer]:
    """The layers of ``root`` that ``plan`` cuts over ``ranks``, in the order of the modules.

    Raises:
        ValueError: for a pattern that matches nothing, a style that a module cannot have, a size that does not divide, one of two
            tied layers; each names the way out.
    """
    names = {name: module for name, module in root.named_modules() if name}
    chosen: dict[str, str] = {}
    given: set[str] = set()
    for pattern, style in ({"*": "auto"} if plan == "auto" else plan).items():
        found = matching("tensor_parallel_plan", pattern, root, names)
        if style == "auto":
            automatic = auto_styles(root)
            chosen.update({n: automatic[n] for n in found if n in automatic})
        else:
            chosen.update(dict.fromkeys(found, ALIASES.get(style, style)))
            given.update(found)
    layers = []
    for name, module in names.items():
        if name not in chosen or chosen[name] == "replicate":
            continue
        style_ = STYLES[chosen[name]]
        words, fits = style_.fits
        if not fits(module):
            if name in given and not any(True for _ in module.parameters()):
                continue  # a pattern that also takes in an activation
            raise ValueError(
                f"tensor_parallel_plan gives {name!r}, a {type(module).__name__}, the style {style_.name!r}, which is for {words}. Give it "
                "another style, or 'replicate'."
            )
        layers.append(Layer(name, module, style_))
    if not layers:
        raise ValueError(
            f"tensor_parallel_plan={plan!r} cuts no layer of {type(root).__name__}. Give a mapping from its modules to styles, such as "
            "{'layers.*.up_proj': 'colwise', 'layers.*.down_proj': 'rowwise'}, or use tensor_parallel_size=1."
        )
    for layer in layers:
        _check_sizes(root, layer, ranks)
    _check_tied(root, layers)
    return layers


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _check_sizes(root: nn.Module, layer: Layer, ranks: int) -> None:
    for cut in layer.style.cut(layer.module):
        size = getattr(cut.owner, cut.key).shape[cut.dim] // cut.parts
        unit, what = _unit(root, layer, cut, size)
        if (size // unit) % ranks or size % unit:
            count = size // unit
            raise ValueError(
                f"tensor_parallel_size={ranks} does not divide the {count} {what} of {layer.name!r}. Sizes that do: {_divisors(count)}. Or keep "
                f"this layer whole: tensor_parallel_plan={{'*': 'auto', '{layer.name}': 'replicate'}}"
                + (", with the layers that it works together with." if layer.style.opens or layer.style.closes else ".")
            )


def _unit(root: nn.Module, layer: Layer, cut: CutParameter, size: int) -> tuple[int, str]:
    """How many numbers belong together, and what to call one such piece."""
    if layer.style.name == "heads":
        return size // layer.module.num_heads, "heads"  # type: ignore[operator, return-value]
    if layer.style.name == "vocabulary":
        return 1, "rows (the vocabulary)"
    if layer.style.opens or layer.style.closes:
        parent = root.get_submodule(layer.name.rpartition(".")[0])
        head = getattr(parent, "head_dim", None) or getattr(parent, "attention_head_size", None)
        if isinstance(head, int) and size % head == 0:
            return head, "heads"
    return 1, "features" if layer.style.name != "colwise_gather_output" else "outputs (the vocabulary, in a head)"


def _check_tied(root: nn.Module, layers: list[Layer]) -> None:
    """A parameter of several modules is cut in the same way by all of them, or by none."""
    cuts: dict[tuple[nn.Module, str], CutParameter] = {
        (cut.owner, cut.key): cut for layer in layers for cut in layer.style.cut(layer.module)
    }
    seen: dict[Tensor, tuple[str, tuple[int, int] | None]] = {}
    for name, module in root.named_modules():
        for key, param in module._parameters.items():
            if param is None or ((module, key) not in cuts and any(True for _ in module.children())):
                continue  # a second name in a module around the layer; if that uses it, torch raises
            cut = cuts.get((module, key))
            how = None if cut is None else (cut.dim, cut.parts)
            first = seen.setdefault(param, (f"{name}.{key}", how))
            if first[1] != how:
                raise ValueError(
                    f"{first[0]!r} and {name + '.' + key!r} are one parameter, but tensor_parallel_plan cuts "
                    + ("only one of them." if None in (how, first[1]) else "them in different ways.")
                    + " Cut both (an embedding with 'vocabulary' and its head with 'colwise_gather_output'), or give both 'replicate'."
                )


def regions(root: nn.Module, layers: list[Layer]) -> dict[str, list[Layer]]:
    """The smallest modules that take and give replicated tensors, and the layers in each.

    Raises:
        ValueError: when the output of a layer stays cut, or the input of one never is.
    """
    alone = [layer for layer in layers if not layer.style.opens and not layer.style.closes]
    found: dict[str, list[Layer]] = {layer.name: [layer] for layer in alone if layer.style.forward is not None}
    ends = {end: [layer for layer in layers if getattr(layer.style, end)] for end in ("opens", "closes")}
    for end, other, problem in (
        (
            "opens",
            "closes",
            "leaves its output cut, and no layer near it is 'rowwise' and takes it. Use 'colwise_gather_output'",
        ),
        (
            "closes",
            "opens",
            "takes a cut input, and no layer near it is 'colwise' and gives one. Use 'rowwise_split_input'",
        ),
    ):
        for layer in ends[end]:
            path = layer.name.split(".")
            for length in range(len(path) - 1, -1, -1):
                above = ".".join(path[:length])
                if any(o.name.startswith(f"{above}." if above else "") for o in ends[other]):
                    break
            else:
                raise ValueError(
                    f"tensor_parallel_plan: {layer.name!r} ({layer.style.name!r}) {problem}, or 'replicate'."
                )
            found.setdefault(above, [])
    for layer in alone:
        between = [n for n, inside in found.items() if not inside and (not n or layer.name.startswith(f"{n}."))]
        if layer.style.name == "replicated_with_grad_allreduce" and not between:
            raise ValueError(
                f"tensor_parallel_plan: {layer.name!r} has the style {layer.style.name!r}, but is not between layers that are cut, so that its "
                "gradient is whole already. Leave it out, or give it 'replicate'."
            )
    for name, inside in found.items():
        if not inside:
            inside += [layer for layer in layers if not name or layer.name.startswith(f"{name}.")]
    outermost = [n for n in found if not any(o != n and (not o or n.startswith(f"{o}.")) for o in found)]
    return {name: found[name] for name in outermost}


def cut_parameters(layers: list[Layer]) -> set[Tensor]:
    """The parameters of which each rank will hold a part."""
    return {getattr(cut.owner, cut.key) for layer in layers for cut in layer.style.cut(layer.module)}


def is_row_of_pairs(root: nn.Module, name: str, layers: list[Layer]) -> bool:
    """Whether a region is a Sequential of layers between whose pairs tensors are replicated."""
    return type(root.get_submodule(name)) is nn.Sequential and all(
        layer.name.rpartition(".")[0] == name for layer in layers
    )


def together(root: nn.Module, places: Mapping[str, list[Layer]]) -> list[list[str]]:
    """Names of layers between which tensors are cut, so that no pipeline stage may end there."""
    groups: list[list[str]] = []
    for name, layers in places.items():
        if not is_row_of_pairs(root, name, layers):
            groups.append([layer.name for layer in layers])
            continue
        for layer in layers:
            if layer.style.opens:
                groups.append([layer.name])
            elif layer.style.closes:
                groups[-1].append(layer.name)
    return groups
