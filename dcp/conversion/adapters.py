"""Low-rank adapters in the layout of PEFT.

A folder contains ``adapter_config.json`` and ``adapter_model.safetensors`` or ``.bin``. Each adapted weight
grows by ``B @ A`` times ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` with ``use_rslora``. Transposed
weights (GPT-2, embeddings) get the transposed product. Other configurations are refused.

Untrusted regular expressions can take exponential time in `re`. Accepted patterns are limited to characters
and classes, groups, ``|``, ``^``, ``$`` and repetitions that are not nested.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dcp.conversion.hf_folder import ADAPTER_CONFIG
from dcp.planners.weight_maps.axes import MAX_CONFIG_BYTES
from dcp.storage.errors import CheckpointFormatError, OptionError, PlanError, UnsupportedFormatError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import Source, open_source
from dcp.storage.formats.safetensors import parse_json
from dcp.storage.near_names import listed
from dcp.storage.stores import OpenStore
from dcp.storage.stores.base import Store

_MAX_LENGTH: Final = 1000
_MAX_NESTING: Final = 20
_CHARACTERS: Final = re.compile(
    r"\[\^?\]?(?:[^\[\]\\]|\\[dws.\\\[\]^-])*\]|\\[dDwWsS\W_]|[^^$*+?{}\[\]()|\\]"
)
"""One character, or any of a class."""
_OFTEN: Final = re.compile(r"(?:([*+?])|\{(\d{1,4})(,(\d{0,4}))?\})\??")
"""Suffixes of repetitions; lazy ones are equivalent here to greedy ones."""
_COUNTS: Final = {"*": (0, _MAX_LENGTH), "+": (1, _MAX_LENGTH), "?": (0, 1)}

_Ends = frozenset[int]
"""Positions in a name where a match may end."""

_Matcher = Callable[[str, _Ends], _Ends]
"""A function from possible starts of a match to its possible ends."""


class ModulePattern:
    """A PEFT pattern: matches a whole module name, or its end after a dot. OptionError for unsupported
    expressions."""

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_LENGTH:
            raise OptionError(f"a pattern of more than {_MAX_LENGTH} characters")
        self._text, self._at, self._depth = text, 0, 0
        self._repeats = 0
        """The number of repetitions so far."""
        self._matcher = self._alternatives()
        if self._at < len(text):
            raise self._refused()

    def match(self, name: str) -> bool:
        r"""Test the match of ``(.*\.)?(text)$``. OptionError for names over 1,000 characters."""
        if len(name) > _MAX_LENGTH:
            raise OptionError(f"{name:.80}... is longer than {_MAX_LENGTH} characters, the limit of patterns")
        begins = frozenset([0, *(at + 1 for at, character in enumerate(name) if character == ".")])
        return len(name) in self._matcher(name, begins)

    def _refused(self, at: int | None = None) -> OptionError:
        """Return the error for the text at a position, by default the current one."""
        rest = self._text[self._at if at is None else at :]
        return OptionError(f"{rest[:40]!r} in the pattern {self._text!r:.80}")

    def _alternatives(self) -> _Matcher:
        """Parse up to ``)`` or the end."""
        found = [self._sequence()]
        while self._takes(r"\|"):
            found.append(self._sequence())
        return lambda name, at: frozenset().union(*(each(name, at) for each in found))

    def _takes(self, token: str | re.Pattern[str]) -> re.Match[str] | None:
        found = re.compile(token).match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _sequence(self) -> _Matcher:
        parts: list[_Matcher] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if self._takes(r"\^"):
                parts.append(lambda name, at: at & {0})
            elif self._takes(r"\$"):
                parts.append(lambda name, at: at & {len(name)})
            else:
                parts.append(self._repeated())

        def match(name: str, at: _Ends) -> _Ends:
            for part in parts:
                at = part(name, at) if at else at
            return at

        return match

    def _repeated(self) -> _Matcher:
        before, atom, begin = self._repeats, self._atom(), self._at
        found = self._takes(_OFTEN)
        if found is None:
            return atom
        if found[1]:
            low, high = _COUNTS[found[1]]
        else:
            low = int(found[2])
            high = low if found[3] is None else int(found[4] or max(low, _MAX_LENGTH))
        follows = self._text[self._at : self._at + 1]
        if self._repeats > before or high < low or follows in ("*", "+", "?", "{"):
            raise self._refused(begin)
        self._repeats += 1
        return lambda name, at: _often(atom, name, at, low, high)

    def _atom(self) -> _Matcher:
        begin = self._at
        if self._takes(r"\((?:\?:)?"):
            self._depth += 1
            if self._depth > _MAX_NESTING or self._text.startswith("?", self._at):
                raise self._refused(begin)
            inner = self._alternatives()
            if not self._takes(r"\)"):
                raise self._refused()
            self._depth -= 1
            return inner
        found = self._takes(_CHARACTERS)
        if found is None:
            raise self._refused()
        try:
            one = re.compile(found[0] if found[0] == "." or len(found[0]) > 1 else re.escape(found[0]))
        except re.error:
            raise self._refused(begin) from None
        return lambda name, at: frozenset(end + 1 for end in at if one.match(name, end))


def _often(atom: _Matcher, name: str, at: _Ends, low: int, high: int) -> _Ends:
    """Return the ends of ``low`` to ``high`` repetitions of ``atom``."""
    found = at if low == 0 else frozenset()
    for count in range(1, min(high, low + len(name) + 1) + 1):
        at = atom(name, at)
        if not at or (count > low and at <= found):
            break
        found = found | at if count >= low else found
    return found


# -- adapters ------------------------------------------------------------------------------------------------

_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin")
_MAX_LISTED: Final = 10
_MAX_PATTERNS: Final = 10_000
_MAX_NUMBER: Final = 1e30
_FLAGS: Final = ("use_rslora", "fan_in_fan_out", "ensure_weight_tying")
_FACTOR: Final = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?:(?P<factor>[AB])\.weight|embedding_(?P<of_embedding>[AB]))",
    re.DOTALL,
)
_INITIAL: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that leave the weights of the base unchanged."""
_NOT_DONE: Final = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of the LoRA factors",
    "modules_to_save": "fully saved modules",
    "trainable_token_indices": "trainable tokens",
    "layer_replication": "replicated layers",
    "target_parameters": "target parameters outside of modules' weights",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "Megatron's layers",
}


_ByEnd = Sequence[tuple[re.Pattern[str] | ModulePattern, Any]]
"""Values by the end of a module's name."""


class LowRank(NamedTuple):
    """A product added to the weight ``target``: names of the factors B and A, and of the product.

    ``is_turned``: transpose a square weight; ``is_embedding``: factors of an embedding; ``keeps_ties``: tied
    weights get equal products.
    """

    target: str
    left: str
    right: str
    shape: tuple[int, int]
    rank: int
    scale: float
    is_turned: bool
    is_embedding: bool
    keeps_ties: bool


@dataclass(frozen=True)
class AdapterConfig:
    """Fields of ``adapter_config.json`` that define the products. ``alphas`` are by end of a module name."""

    rank: int
    alpha: float
    rank_stabilised: bool
    fan_in_fan_out: bool
    keeps_ties: bool
    ranks: _ByEnd
    alphas: _ByEnd

    @classmethod
    def of(cls, data: bytes, path: str) -> AdapterConfig:
        """Check a configuration. Raises UnsupportedFormatError with all unsupported features, and
        CheckpointFormatError."""
        config = parse_json(data, path)
        asked = [what for name, what in _NOT_DONE.items() if config.get(name)]
        if config.get("peft_type") != "LORA":
            asked.insert(0, f"adapters of the type {config.get('peft_type')!r:.80}")
        if config.get("bias", "none") != "none":
            asked.append(f"bias {config['bias']!r:.80}")
        if config.get("init_lora_weights") not in _INITIAL:
            asked.append(f"base weights changed by init_lora_weights={config['init_lora_weights']!r:.80}")
        patterns = [config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
        if not all(isinstance(one, dict) for one in patterns):
            asked.append("rank_pattern or alpha_pattern that is not a JSON object")
            patterns = []
        if any(len(one) > _MAX_PATTERNS for one in patterns):
            raise CheckpointFormatError(
                f"{path} has more than {_MAX_PATTERNS} patterns, the limit", path=path
            )
        by_end = [[*_compiled(one, asked)] for one in patterns]
        if asked:
            raise UnsupportedFormatError(
                f"{path}: merging does not support {'; '.join(asked)}; merge the adapter with PEFT", path=path
            )
        faults = [*_faults(config)]
        if faults:
            raise CheckpointFormatError(f"{path}: {listed(faults, most=_MAX_LISTED, show=str)}", path=path)
        stabilised, turned, keeps_ties = (bool(config.get(name)) for name in _FLAGS)
        alpha = float(config["lora_alpha"])
        return cls(config["r"], alpha, stabilised, turned, keeps_ties, *by_end)

    def rank_of(self, module: str) -> int:
        """Return the configured rank of a module's factors."""
        return int(_by_end(self.ranks, module, self.rank))

    def scale(self, module: str) -> float:
        """Return the scale of a module's product."""
        rank, alpha = self.rank_of(module), float(_by_end(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield names of fields with invalid numbers; values are never rounded."""
    for name, pattern, is_one, kind in (
        ("r", "rank_pattern", _is_whole, "whole number above 0"),
        ("lora_alpha", "alpha_pattern", _is_number, "number above 0"),
    ):
        own = {f"{pattern} of {end!r:.80}": value for end, value in (config.get(pattern) or {}).items()}
        for what, value in {name: config.get(name), **own}.items():
            if not is_one(value):
                yield f"{what} must be a {kind}, not {value!r:.80}"
    for name in _FLAGS:
        if not isinstance(config.get(name), bool | None):
            yield f"{name} must be true or false, not {config[name]!r:.80}"


def _is_plain(pattern: str) -> bool:
    """Test for a plain pattern without expressions, which `re` matches quickly."""
    return re.fullmatch(r"\^?[\w.\\-]+", pattern) is not None and "\\" not in pattern.replace("\\.", "")


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and 0 < value < _MAX_NUMBER


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _compiled(
    patterns: Mapping[str, Any], refused: list[str]
) -> Iterator[tuple[re.Pattern[str] | ModulePattern, Any]]:
    """Yield patterns as matchers with values; unsupported patterns are collected in ``refused``."""
    for end, value in patterns.items():
        try:
            plain = re.compile(rf"(.*\.)?({end})$") if _is_plain(end) else None
            yield plain or ModulePattern(end), value
        except OptionError as error:
            refused.append(str(error))


def _by_end(patterns: _ByEnd, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a name, as PEFT does."""
    return next((value for end, value in patterns if end.match(module)), default)


def open_adapter(checkpoint_id: str, *, open_store: OpenStore) -> Source:
    """Return an adapter's folder. Raises CheckpointNotFoundError, and the formats' errors."""
    store = open_store(checkpoint_id)
    name = next((name for name in _FILES if store.stat(name) is not None), None)
    if name is None:
        return open_source(checkpoint_id, open_store=open_store)
    return open_source(store.path_of(name), open_store=open_store)


def low_ranks(index: CheckpointIndex, store: Store) -> list[LowRank]:
    """Return the products of adapter ``index``.

    Raises PlanError with all unmatched factors, and CheckpointFormatError for ranks unlike the configuration.
    """
    path = store.path_of(ADAPTER_CONFIG)
    config = AdapterConfig.of(store.read(ADAPTER_CONFIG, limit_bytes=MAX_CONFIG_BYTES), path)
    modules: dict[str, dict[str, str]] = {}
    strange, wrong, found = list(index.objects.fqns), list[str](), list[LowRank]()
    for name in index.fqns:
        match = _FACTOR.fullmatch(name)
        if match is None:
            strange.append(name)
        else:
            modules.setdefault(match["module"], {})[match["factor"] or match["of_embedding"]] = name
    shapes = {name: index.shape(row) for row, name in enumerate(index.fqns)}
    keeps_ties = config.keeps_ties and any("lora_embedding_" in own.get("B", "") for own in modules.values())
    for module, own in modules.items():
        left, right = (shapes.get(own.get(side, ""), ()) for side in "BA")
        if not (len(left) == len(right) == 2 and left[1] == right[0] > 0):
            strange.append(module)
            continue
        rank, is_embedding = config.rank_of(module), "lora_embedding_" in own["B"]
        if rank != left[1]:
            wrong.append(f"{module!r} has rank {left[1]}, but the configuration says {rank}")
        shape, is_turned = (left[0], right[1]), config.fan_in_fan_out or is_embedding
        facts = shape, left[1], config.scale(module), is_turned, is_embedding, keeps_ties
        found.append(LowRank(f"{module}.weight", own["B"], own["A"], *facts))
    if strange or not modules:
        raise PlanError(
            f"{store.url}: not pairs of LoRA factors lora_A and lora_B of one rank: "
            f"{listed(strange, most=_MAX_LISTED) or 'no tensors'}",
            fqns=strange,
        )
    if wrong:
        raise CheckpointFormatError(
            f"{store.url}: {listed(wrong, most=_MAX_LISTED, show=str)}", path=store.url
        )
    return found
