"""``tensor_parallel_plan="auto"``: which layers belong together, by the plans that models bring along and by their structure.

A guess is safe: every region that is cut is compared with the whole one before it is used (see :mod:`.check`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from lightning_partrain.parallel.tensor.layers import in_features, is_conv1d, is_linear, out_features
from lightning_partrain.parallel.tensor.styles import ALIASES, STYLES

#: Layers that treat every number alone, so that they may stand between a column-cut and a row-cut layer.
ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Softplus,
    nn.LogSigmoid,
    nn.Dropout,
    nn.Identity,
)


def auto_styles(root: nn.Module) -> dict[str, str]:
    """Name of a module -> its style. Modules that are not named stay whole.

    Raises:
        ValueError: when a model's own plan has a style that is not known here.
    """
    styles: dict[str, str] = {}
    pretrained: list[str] = []
    for name, module in root.named_modules():
        if any(name.startswith(f"{p}." if p else "") for p in pretrained):
            continue
        own = _own_plan(module)
        if own:
            pretrained.append(name)
            styles.update(_of_own_plan(name, module, own))
    for name, module in root.named_modules():
        # what the root does with its own layers is in steps, which are not checked
        if not name or any(name == p or name.startswith(f"{p}." if p else "") for p in pretrained):
            continue
        for child, style in _of_structure(module):
            styles.setdefault(f"{name}.{child}" if name and child else name or child, style)
    styles.update(_embeddings_and_heads(root, styles))
    return styles


def _is_pretrained(module: nn.Module) -> bool:
    return hasattr(module, "get_input_embeddings") and hasattr(module, "config")


def _own_plan(module: nn.Module) -> Mapping[str, str]:
    """Hugging Face's plan of a model, with the names relative to ``module``."""
    if not _is_pretrained(module):
        return {}
    return dict(getattr(module, "tp_plan", None) or {})


def _of_own_plan(prefix: str, module: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for pattern, style in plan.items():
        style = ALIASES.get(style, style)
        for name, _ in module.named_modules():
            if fnmatchcase(name, pattern):
                if style not in STYLES:
                    raise ValueError(
                        f"The plan that {type(module).__name__} brings along gives {name!r} the style {style!r}, which is not supported. Give a "
                        f"tensor_parallel_plan of your own, with any of: {', '.join(STYLES)}."
                    )
                yield (f"{prefix}.{name}" if prefix else name), style


def _of_structure(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Children of ``module`` (or itself, named ``""``) and their styles, by what it is built of."""
    if type(module) is nn.MultiheadAttention:
        yield "", "heads"
    elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        yield from (("linear1", "colwise"), ("linear2", "rowwise"))
    elif isinstance(module, nn.Sequential):
        yield from _pairs_in_a_row(module)
    else:
        yield from _attention(module) or _feed_forward(module)


def _linear(module: Any) -> bool:
    return isinstance(module, nn.Module) and (is_linear(module) or is_conv1d(module))


def _attention(module: nn.Module) -> list[tuple[str, str]]:
    """Attention whose code takes as many heads as come: it has a ``head_dim``, as Hugging Face's has."""
    if not isinstance(getattr(module, "head_dim", None), int):
        return []
    out = next((n for n in ("o_proj", "out_proj", "c_proj") if _linear(getattr(module, n, None))), None)
    if out is None:
        return []
    if all(_linear(getattr(module, n, None)) for n in ("q_proj", "k_proj", "v_proj")):
        return [("q_proj", "colwise"), ("k_proj", "colwise"), ("v_proj", "colwise"), (out, "rowwise")]
    fused = getattr(module, "c_attn", None)
    width = getattr(module, "split_size", None)
    if _linear(fused) and isinstance(width, int) and out_features(fused) == 3 * width:
        return [("c_attn", "fused_qkv"), (out, "rowwise")]
    return []


def _is_elementwise(module: nn.Module) -> bool:
    if isinstance(module, ELEMENTWISE):
        return True
    # Hugging Face's activations are classes of their own, in one file
    return not any(True for _ in module.parameters()) and type(module).__module__.endswith(".activations")


def _feed_forward(module: nn.Module) -> list[tuple[str, str]]:
    """One or two linear layers to a hidden size, an element-wise function, one back."""
    children = list(module.named_children())
    linears = [name for name, child in children if _linear(child)]
    others = [child for name, child in children if name not in linears]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or module._parameters or len(linears) not in (2, 3):
        return []
    if not all(map(_is_elementwise, others)):
        return []
    *first, last = (getattr(module, name) for name in linears)
    hidden = in_features(last)
    if any(out_features(f) != hidden or in_features(f) != in_features(first[0]) for f in first):
        return []
    function = any(not isinstance(other, (nn.Dropout, nn.Identity)) for other in others)
    if not function and hidden <= in_features(first[0]):  # layers side by side look the same
        return []
    return [*((name, "colwise") for name in linears[:-1]), (linears[-1], "rowwise")]


def _pairs_in_a_row(module: nn.Sequential) -> Iterator[tuple[str, str]]:
    waiting: str | None = None
    for name, child in module.named_children():
        if _linear(child):
            if waiting is None:
                waiting = name
            else:
                yield waiting, "colwise"
                yield name, "rowwise"
                waiting = None
        elif not _is_elementwise(child):
            waiting = None


def _embeddings_and_heads(root: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Embeddings of a vocabulary and the heads that score it."""
    inputs: dict[nn.Module, str] = {}
    heads: dict[nn.Module, str] = {}
    names = {module: name for name, module in root.named_modules()}
    fitting = (None, "vocabulary", "colwise_gather_output")
    free = {m: n for m, n in names.items() if n and styles.get(n) in fitting}
    for module in root.modules():
        if _is_pretrained(module):
            given = (_or_none(module.get_input_embeddings), _or_none(getattr(module, "get_output_embeddings", None)))
            inputs |= {m: names[m] for m in given[:1] if m in free and STYLES["vocabulary"].fits[1](m)}
            heads |= {m: names[m] for m in given[1:] if m in free and is_linear(m)}
    sizes = {out_features(m): m for m in free if is_linear(m)}
    weights = {m.weight: m for m in free if is_linear(m)}
    for module in free:
        if not STYLES["vocabulary"].fits[1](module) or module in inputs:
            continue
        head = weights.get(module.weight) or sizes.get(module.num_embeddings)
        if head is not None and names[head] not in styles:
            inputs[module], heads[head] = names[module], names[head]
    cut = {param for m in (*inputs, *heads) for param in m.parameters()}
    users: dict[Tensor, list[nn.Module]] = {}
    for module in names:
        for param in module._parameters.values():
            if param in cut and not any(True for _ in module.children()):
                users.setdefault(param, []).append(module)
    stay = {m for modules in users.values() if not all(u in inputs or u in heads for u in modules) for m in modules}
    yield from ((name, "vocabulary") for m, name in inputs.items() if m not in stay)
    yield from ((name, "colwise_gather_output") for m, name in heads.items() if m not in stay)
    yield from ((names[m], "replicate") for m in stay if names[m] in styles)


def _or_none(function: Any) -> Any:
    try:
        return function() if function is not None else None
    except NotImplementedError:
        return None
