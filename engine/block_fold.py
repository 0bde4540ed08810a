"""Block folds: folds whose contributions come from matrix products, as a description. Attention is one.

There are two sides. A *held* row stays with one lane while the *streamed* rows pass by in blocks. A pair of a held and
a streamed row has products (dot products of the two), from which expressions make what the pair contributes: to states,
one number a held row (`State` of engine/fold.py), and to sums of streamed rows, each times a weight. Attention forward:

    held q, streamed k and v; score = scale * (q . k)
    largest: max of score; total: sum of exp(score - largest); o: sum of exp(score - largest) * v
    outputs: o / total, and the log-sum-exp, largest + log(total)

The kernel is printed by engine/block_fold_glsl.py, `BlockFold.reference` is the same in NumPy.

Order of accumulation: in a product each of up to 8 lanes goes over its own dimensions, from the first on, by fma; then
the lanes' sums are added in halves (shaders/block_fold.glsl). A block is two streamed rows, the first
one's number a multiple of that. In each block come the maxima of all its pairs, then the sum of a state's contributions
in order, which is added to the state (brought to the new maximum by its `aligned`, where it has one: by fma), then the
streamed rows in order into the sums by fma, after their factor. It is a function of the head dimension and the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .description_checks import mistyped, require_mapping, require_name, require_sequence
from .expr import RANDOM, Expr, checked_name, variable
from .expr_numpy import evaluate
from .expr_walk import named, topological
from .fold import Walk
from .kernel import SHADER_DIR, is_own_shader
from .kernel_text import freeze

MOST_OPTIONAL = 4
_OWN_ARGUMENTS = ("num_held", "num_streamed", "heads", "flags", "members")  # a kernel's, besides p_ + a name
# what a number that comes as a tensor belongs to -> the tensor's shape
NUMBER_KINDS = {
    "held": "[batch, heads, rows], one a held row",
    "streamed": "[batch, heads, rows], one a streamed row",
    "head": "[heads], one a head of the side that has more of them",
}
# what a position counts
POSITION_KINDS = {
    "held": "held rows from 0",
    "streamed": "streamed rows from 0",
    "held_end": "held rows, so that the last one stands where the last streamed row does",
    "streamed_end": "streamed rows, so that the last one stands where the last held row does",
}


@dataclass(frozen=True)
class RowSum:
    """A sum of streamed rows, each times the weight of its pair: the second product.

    weight: an expression of the pair and, when there is `aligned`, of the walk's maxima as they are with it in them.
    aligned: the sum so far, under its own name, times what brings it from the `old_` maxima to the new ones.
    """

    name: str
    of: str
    weight: Expr
    aligned: Expr | None = None

    @property
    def factor(self) -> Expr | None:
        """What the sum so far is multiplied by. Raises ValueError when `aligned` is no product with the sum."""
        if self.aligned is None:
            return None
        mine = [arg.op == "variable" and arg.name == self.name for arg in self.aligned.args]
        if self.aligned.op != "mul" or sum(mine) != 1:
            raise ValueError(f"row sum {self.name}: aligned must be {self.name} * a factor, not {self.aligned!r}")
        return self.aligned.args[mine.index(False)]


@dataclass(frozen=True, eq=False)
class SeenRows:
    """A mask: which streamed rows a held row sees, always a range of them, so that blocks nobody sees are not visited.

    shader: a file of shaders/ with `int seen_limit(uint batch)`, worked out once, and `ivec2 seen_of_row(int row,
    int limit, uint batch)` and `seen_of_rows(int first, int past, ...)`: first row seen and one past the last. tensors:
    names of int32 tensors that it reads as `args.p_NAME`; it may use the lower 27 bits of `args.flags`. defines: names
    that are set for it. Raises ValueError for a shader that is no such file.
    """

    shader: str
    tensors: Sequence[str] = ()
    defines: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_own_shader(self.shader):
            raise ValueError(f"seen: {self.shader!r} is no file of {SHADER_DIR}: give the name of one that lies there")
        require_sequence("seen", "tensors", self.tensors, "['key_lengths']", str)
        require_mapping("seen", "defines", self.defines)
        for name, number in self.defines.items():
            if not isinstance(name, str) or not isinstance(number, (int, np.integer)):
                raise mistyped("seen", f"define {name}", number, "a whole number by name, such as {'KEYS_HELD': 0}")
        freeze(self)


@dataclass(frozen=True, eq=False)
class BlockFold:
    """A fold over blocks of streamed rows.

    held, streamed: names of the rows, each [batch, rows, heads, head_dim]. products: name -> (held row, streamed row).
    walk: states of a held row, and `results`, worked out at the end. sums: sums of streamed rows. rows: outputs like
    the held rows, expressions of one element of the sums and held rows. values: outputs [batch, heads, rows], one a
    held row. numbers: name -> one of NUMBER_KINDS; absent: name -> what is taken for one that is not given. scalars:
    names of floats of one call. dots: name -> two held rows whose dot product is a number of the row. positions: name
    -> one of POSITION_KINDS, exact floats. start: state -> its value at the beginning, where that is not 0 or -inf.
    unseen: pairs for which it holds do not count, besides those that the mask `seen` leaves out.
    shared: the side with fewer heads, which must divide the other's. Held head h reads streamed head h // group when
    "streamed"; when "held", it folds over the streamed heads h * group ... + group - 1 in order.
    strides: row name -> name of what says how far its rows lie apart, where that is not "held_row" or "streamed_row".

    A pair's expressions know products, positions, numbers and scalars; those of a row what belongs to it alone.
    Raises ValueError for an expression of something that is not known where it stands, TypeError for what is no
    expression, no mapping, no list where one is needed.
    """

    name: str
    held: Sequence[str]
    streamed: Sequence[str]
    products: Mapping[str, tuple[str, str]]
    walk: Walk = field(default_factory=lambda: Walk(()))
    sums: Sequence[RowSum] = ()
    rows: Mapping[str, Expr] = field(default_factory=dict)
    values: Mapping[str, Expr] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, float] = field(default_factory=dict)
    scalars: Sequence[str] = ()
    dots: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    positions: Mapping[str, str] = field(default_factory=dict)
    start: Mapping[str, Expr] = field(default_factory=dict)
    unseen: Expr | None = None
    seen: SeenRows | None = None
    shared: str = "streamed"
    strides: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_types()
        self._check_names()
        self._check_strides()
        of_row = self.known_of_row
        of_pair = of_row | set(self.products) | set(self.positions) | set(self.numbers)
        if self.unseen is not None:
            self._check("unseen", self.unseen, of_pair - set(self.products), kind="b")
        maxima: set[str] = set()
        for state in self.walk.states:
            if state.merge not in ("sum", "max") or (state.merge == "max" and state.aligned is not None):
                self._refuse(f"state {state.name} is a sum, or a max that needs no aligning")
            self._check(state.name, state.contribution, of_pair | (set() if state.aligned is None else maxima))
            if state.aligned is not None:
                self._check_aligned(state.name, state.aligned, maxima, {state.name})
            elif state.merge == "max":
                maxima.add(state.name)
        for row_sum in self.sums:
            factor = row_sum.factor
            self._check(row_sum.name, row_sum.weight, of_pair | (set() if factor is None else maxima))
            if factor is not None:
                self._check_aligned(row_sum.name, factor, maxima)
            if row_sum.of not in self.streamed:
                self._refuse(f"{row_sum.name} sums {row_sum.of!r}, which is no streamed row")
        states = {state.name for state in self.walk.states}
        for name, first in self.start.items():
            if name not in states:
                self._refuse(f"start is given for {name!r}, which is no state")
            self._check(f"start of {name}", first, of_row)
        known = of_row | states
        for name, result in self.walk.results.items():
            self._check(name, result, known)
            known.add(name)
        for name, value in self.values.items():
            self._check(name, value, known)
        known |= {*self.held, *(row_sum.name for row_sum in self.sums)}
        for name, row in self.rows.items():
            self._check(name, row, known)
        freeze(self)

    def _check_types(self) -> None:
        require_name("block fold", self.name)
        owner = f"block fold {self.name!r}"
        for what in ("held", "streamed", "scalars"):
            require_sequence(owner, what, getattr(self, what), "['q']")
        require_sequence(owner, "sums", self.sums, "[RowSum(...)]", RowSum)
        for what in ("products", "rows", "values", "numbers", "absent", "dots", "positions", "start", "strides"):
            require_mapping(owner, what, getattr(self, what))
        if not isinstance(self.walk, Walk):
            self._mistyped("walk", self.walk, "a Walk(states, results) of engine/fold.py")
        self.walk.check_types(owner)
        for row_sum in self.sums:
            if row_sum.aligned is not None and not isinstance(row_sum.aligned, Expr):
                self._mistyped(f"aligned of {row_sum.name}", row_sum.aligned, "an expression, the sum * a factor")
        if self.seen is not None and not isinstance(self.seen, SeenRows):
            remedy = "a SeenRows such as KEYS_OF_QUERIES of engine/attention_masks.py, or None; causal is a call's"
            self._mistyped("seen", self.seen, remedy)
        for what, pairs in (("products", self.products), ("dots", self.dots)):
            for name, pair in pairs.items():
                if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
                    self._refuse(f"{what}: {name} is {pair!r}, needed are the names of two rows, such as ('q', 'k')")
        for name, number in self.absent.items():
            if isinstance(number, bool) or not isinstance(number, (int, float, np.integer, np.floating)):
                self._mistyped(f"absent of {name}", number, "a number, which stands in where none is given")

    def _check_strides(self) -> None:
        """Strides are arguments of the kernel under the names they are given."""
        rows = (*self.held, *self.streamed, *self.rows)
        for row, name in self.strides.items():
            if row not in rows:
                self._refuse(f"strides are given for {row!r}, which is no row; those are {', '.join(rows)}")
            if not isinstance(name, str):
                self._mistyped(f"stride of {row}", name, "a name, such as 'q_row'")
            try:
                checked_name(name)
            except ValueError as error:
                self._refuse(f"stride of {row}: {error}")
            if name in _OWN_ARGUMENTS or name.startswith(("p_", "_")):
                self._refuse(
                    f"stride of {row} is called {name!r}, as an argument of the kernel's own is: use another name, "
                    f"such as {row + '_row'!r}"
                )

    def _check_names(self) -> None:
        inputs = [*self.held, *self.streamed, *self.numbers, *self.scalars]
        if self.seen is not None:
            inputs += self.seen.tensors
        made = [*self.products, *self.positions, *self.dots, *self.walk.results]
        made += [*(state.name for state in self.walk.states), *(row_sum.name for row_sum in self.sums)]
        for name in (*inputs, *made, *self.rows, *self.values):
            variable(name)  # raises for one that GLSL would not take
            if name.startswith("_"):
                self._refuse(f"{name!r} begins with an underscore: those names are the kernel's own")
        for names in ([*inputs, *self.rows, *self.values], [*inputs, *made]):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                self._refuse(f"{', '.join(twice)} names more than one thing")
        if not (self.held and self.streamed and self.products):
            self._refuse("it needs a held row, a streamed row and a product")
        if not (self.rows or self.values):
            self._refuse("it has no output: give rows or values")
        if self.shared not in ("held", "streamed"):
            self._refuse(f"shared is {self.shared!r}, not 'held' or 'streamed'")
        for name, (a, b) in self.products.items():
            if a not in self.held or b not in self.streamed:
                self._refuse(f"product {name} is of {a!r} and {b!r}, needed are a held and a streamed row")
        for name, (a, b) in self.dots.items():
            if a not in self.held or b not in self.held:
                self._refuse(f"{name} is of {a!r} and {b!r}, needed are two held rows")
        for what, kinds in ((self.numbers, NUMBER_KINDS), (self.positions, POSITION_KINDS)):
            for name, kind in what.items():
                if kind not in list(kinds):  # it may not be hashable
                    self._refuse(f"{name} is {kind!r}, not one of {', '.join(kinds)}")
        if set(self.absent) - set(self.numbers) or len(self.absent) > MOST_OPTIONAL:
            given = ", ".join(map(str, self.absent))
            self._refuse(f"absent is of {given}: at most {MOST_OPTIONAL} numbers may be left out")

    def _refuse(self, what: str) -> None:
        raise ValueError(f"block fold {self.name!r}: {what}")

    def _mistyped(self, what: str, value: Any, needed: str) -> None:
        raise mistyped(f"block fold {self.name!r}", what, value, needed)

    def _check_aligned(self, what: str, root: Expr, maxima: set[str], more: Collection[str] = ()) -> None:
        """What brings a sum to new maxima: without one it would depend on how streamed rows are cut into blocks."""
        frames = {*maxima, *(f"old_{name}" for name in maxima)}
        self._check(what, root, frames | set(more))
        if not frames.intersection(named([root])):
            self._refuse(
                f"{what} is aligned by {root!r}, which depends on no maximum: name a max state before it and bring the "
                "sum from old_ + its name to it, or leave `aligned` out"
            )

    def _check(self, what: str, root: Expr, known: set[str], kind: str = "f") -> None:
        if not isinstance(root, Expr):
            self._mistyped(what, root, "an expression (engine/expr.py): variable(name), constant(number), or of those")
        if root.kind != kind:
            self._refuse(f"{what} is {root!r}, needed is {'a number' if kind == 'f' else 'a condition'}")
        nodes = topological([root])
        unknown = [n.name for op in ("variable", "whole") for n in nodes if n.op == op and n.name not in known]
        if unknown or any(node.op in RANDOM for node in nodes):
            wrong, right = ", ".join(unknown) or "random numbers", ", ".join(sorted(known))
            self._refuse(f"{what} depends on {wrong}; known there are {right}")

    def of_kind(self, *kinds: str) -> list[str]:
        """Names of the numbers of these kinds, in order."""
        return [name for name, kind in self.numbers.items() if kind in kinds]

    @property
    def known_of_row(self) -> set[str]:
        """What is known of a held row without a pair."""
        own = {name for name, kind in self.positions.items() if kind.startswith("held")}
        numbers = self.of_kind("held") if self.shared == "held" else self.of_kind("held", "head")
        return {*own, *numbers, *self.scalars, *self.dots}

    @property
    def tensor_inputs(self) -> list[str]:
        """Names of the inputs that are tensors, in a kernel's order."""
        return [*self.held, *self.streamed, *self.numbers, *(self.seen.tensors if self.seen is not None else ())]

    @property
    def can_continue(self) -> bool:
        """Whether it can be taken up again from its outputs: it has no states and writes its sums as they are."""
        sums = [variable(row_sum.name) for row_sum in self.sums]
        return not self.walk.states and not self.values and list(self.rows.values()) == sums

    @property
    def rows_in_registers(self) -> int:
        """Rows of head_dim numbers that a lane keeps for a held row."""
        return len({held for held, _ in self.products.values()}) + len(self.sums)

    @property
    def optional_inputs(self) -> list[str]:
        """Names of those that may be left out."""
        return [*self.absent, *(self.seen.tensors if self.seen is not None else ())]

    def stride_of(self, name: str) -> str:
        """Name of the argument that says how far the rows of an input or output lie apart."""
        return self.strides.get(name, "streamed_row" if name in self.streamed else "held_row")

    def reference(self, seen: np.ndarray | None = None, **given: Any) -> list[np.ndarray]:
        """The outputs in NumPy, rows first, in the type of the arrays. seen: [batch, held rows, streamed rows], bool.

        given: arrays and scalars by name. Streamed rows that no held row sees are not looked at.
        """
        first = given[self.held[0]]
        batch, num_held, heads, _ = first.shape
        group = given[self.streamed[0]].shape[2] // heads if self.shared == "held" else 1
        shared = heads // given[self.streamed[0]].shape[2] if self.shared == "streamed" else 1
        rows = {name: np.zeros_like(first) for name in self.rows}
        values = {name: np.zeros((batch, heads, num_held), first.dtype) for name in self.values}
        everything = np.ones((num_held, given[self.streamed[0]].shape[1]), bool)
        for b in range(batch):
            of_batch = everything if seen is None else seen[b]
            for head in range(heads):
                members = range(head * group, (head + 1) * group) if self.shared == "held" else [head // shared]
                one = _HeadFold(self, given, b, head, members, of_batch)
                for name, made in one.outputs().items():
                    if name in rows:
                        rows[name][b, :, head] = made
                    else:
                        values[name][b, head] = made[:, 0]
        return [*rows.values(), *values.values()]


class _HeadFold:
    """A block fold of one held head in NumPy: all its pairs at once, the streamed heads one after the other."""

    def __init__(
        self,
        fold: BlockFold,
        given: Mapping[str, Any],
        batch: int,
        head: int,
        members: Sequence[int],
        seen: np.ndarray,
    ) -> None:
        self.fold = fold
        used = seen.any(axis=0)
        num_held, num_streamed = seen.shape
        self.held = {name: given[name][batch, :, head] for name in fold.held}
        of_members = {name: [given[name][batch, :, member] for member in members] for name in fold.streamed}
        self.streamed = {name: np.concatenate([rows[used] for rows in each]) for name, each in of_members.items()}
        self.dtype = self.held[fold.held[0]].dtype
        self.seen = np.tile(seen[:, used], (1, len(members)))
        known: dict[str, Any] = {name: given[name] for name in fold.scalars}
        for name, kind in fold.numbers.items():
            value = given.get(name)
            if value is None:
                known[name] = fold.absent[name]
            elif kind == "held":
                known[name] = value[batch, head][:, None]
            elif kind == "streamed":
                known[name] = np.concatenate([value[batch, member, used] for member in members])[None]
            else:
                own = np.asarray(value)[list(members) if fold.shared == "held" else [head]]
                known[name] = np.repeat(own, used.sum())[None] if fold.shared == "held" else own[:, None]
        offsets = {"held_end": num_streamed - num_held, "streamed_end": num_held - num_streamed}
        for name, kind in fold.positions.items():
            streamed = np.tile(np.arange(num_streamed)[used], len(members))[None]
            place = np.arange(num_held)[:, None] if kind.startswith("held") else streamed
            known[name] = (place + offsets.get(kind, 0)).astype(self.dtype)
        with np.errstate(all="ignore"):
            for name, (a, b) in fold.dots.items():
                dots = (self.held[a].astype(np.float64) * self.held[b]).sum(axis=1, keepdims=True)
                known[name] = dots.astype(self.dtype)
            for name, (a, b) in fold.products.items():
                each = [_products(self.held[a], rows, a < b) for rows in of_members[b]]
                known[name] = np.concatenate(each if used.all() else [made[:, used] for made in each], axis=1)
        self.known = known
        if fold.unseen is not None:
            self.seen = self.seen & ~self.value(fold.unseen).astype(bool)

    def value(self, root: Expr) -> np.ndarray:
        """An expression of what is known, by then."""
        used = {name: self.known[name] for name in named([root])}
        return evaluate([root], _=np.zeros((1, 1), self.dtype), **used)[0]

    def _add(self, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """weights @ rows, where a row counts only for those that see it: 0 * NaN is NaN."""
        finite = np.isfinite(rows).all(axis=1)
        total = weights[:, finite] @ rows[finite]
        for j in np.flatnonzero(~finite):
            total += np.where(self.seen[:, [j]], weights[:, [j]] * rows[j], 0)
        return total

    def outputs(self) -> dict[str, np.ndarray]:
        """Rows [rows, head_dim] and values [rows, 1] by name."""
        fold, known = self.fold, self.known
        begins = {name: self.value(first) for name, first in fold.start.items()}
        for state in fold.walk.states:
            pairs = np.broadcast_to(self.value(state.contribution), self.seen.shape)
            begin = begins.get(state.name)
            if state.merge == "max":
                top = np.where(self.seen, pairs, -np.inf).max(axis=1, keepdims=True, initial=-np.inf)
                known[f"old_{state.name}"] = np.full((1, 1), -np.inf, self.dtype) if begin is None else begin
                known[state.name] = (top if begin is None else np.maximum(top, begin)).astype(self.dtype)
                continue
            known[state.name] = np.zeros((1, 1), self.dtype) if begin is None else begin
            so_far = known[state.name] if state.aligned is None else self.value(state.aligned)
            known[state.name] = so_far + np.where(self.seen, pairs, 0).sum(axis=1, keepdims=True)
        with np.errstate(all="ignore"):
            for row_sum in fold.sums:
                weights = np.where(self.seen, self.value(row_sum.weight), 0)
                known[row_sum.name] = self._add(weights, self.streamed[row_sum.of])
        for name, result in fold.walk.results.items():
            known[name] = self.value(result)
        made = {name: self.value(root) for name, root in fold.values.items()}
        known |= self.held
        return made | {name: self.value(root) for name, root in fold.rows.items()}


def _products(held: np.ndarray, streamed: np.ndarray, held_first: bool) -> np.ndarray:
    """held @ streamed.T, of all rows of one head on each side, seen or not, in the order of the rows' names.

    A pair's product is to have the same bits in every fold that takes it, whichever side it holds: exp(score - lse) is
    off by the rounding of the score, which for a large one is large. What a BLAS rounds depends on the matrices' shapes
    and order, so those are the same for all; and it is done in float64, as it is for `dots`, with which dO v^T - delta
    then is exactly 0 where o is v.
    """
    a, b = held.astype(np.float64), streamed.astype(np.float64)
    made: np.ndarray = (a @ b.T if held_first else (b @ a.T).T).astype(held.dtype)
    return made
