"""The kernel of a block fold as GLSL: register tiles, loads that a subgroup shares, products, and states between."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from .block_fold import BlockFold
from .expr import Expr, constant, variable
from .expr_glsl import glsl_includes, glsl_statements
from .expr_simplify import simplify
from .expr_walk import named, substitute
from .fold_glsl import plus, scoped
from .kernel import Kernel, read_shader
from .kernel_text import KernelText, key_of
from .register_loops import Braces, Lines, as_loops, loop, written_out
from .variant_choice import op_of_fold

LOOPS = ("unrolled", "rolled", "written")  # by the driver; not at all: registers lie in memory; in the text
BLOCK_ROWS = 2  # streamed rows in one block: part of the accumulation order; few, so that its code stays small
OPTIONAL_SHIFT = 28  # of `flags`: bits that say which optional numbers are given
FOLD_ONCE = 1 << 27  # of `flags`: a tile is not folded again where its sums are not finite


class Tile(NamedTuple):
    """How a kernel cuts its work. No choice but `spread`, which the device gives, changes a bit.

    spread: lanes that share rows. rows: held rows a lane. loops: one of LOOPS. words: for lavapipe: rows are read two
    neighbours at a time, where lanes hold such, and fetched into caches ahead.
    """

    spread: int
    rows: int
    loops: str
    words: bool = False

    @property
    def name(self) -> str:
        """What it adds to a kernel's name."""
        return f"r{self.rows}{'' if self.loops == LOOPS[0] else '_' + self.loops}"


def reads_pairs(head_dim: int, spread: int) -> bool:
    """Whether a lane's dimensions are pairs of neighbours (WIDTH of shaders/block_fold.glsl)."""
    return head_dim % (2 * spread) == 0


def block_fold_kernel(
    fold: BlockFold, head_dim: int, tile: Tile, *, continues: bool = False, suffix: str = ""
) -> Kernel:
    """The kernel of a fold for one tile. continues: sums go on from what their outputs hold (`shared` "held")."""
    name = f"{fold.name}{'_more' * continues}_{head_dim}_{tile.name}{suffix}"
    pairs = tile.words and reads_pairs(head_dim, tile.spread)
    defines: dict[str, int | float | str] = {
        "HEAD_DIM": head_dim,
        "SPREAD": tile.spread,
        "BLOCK": BLOCK_ROWS,
        "ROWS": tile.rows,
        "FOLD_ONCE": f"{FOLD_ONCE}u",
        "ROLLED": int(tile.loops != "unrolled"),
        "WRITTEN": int(tile.loops == "written"),
        "PAIRS": int(pairs),
        "TOUCH": int(tile.words),
        **({} if fold.seen is None else fold.seen.defines),
        **({"WORDS64": 1} if pairs else {}),
    }
    written = (head_dim, tile) if tile.loops == "written" else None
    text = KernelText(
        ("block fold", _key_of(fold), continues, written), lambda: block_fold_glsl(fold, continues, written)
    )
    quads = ["GL_KHR_shader_subgroup_quad"] * (tile.loops == "written")
    arguments, family = block_fold_arguments(fold), op_of_fold(fold.name)
    return Kernel(name, text, arguments, subgroups=1, defines=defines, extensions=quads, family=family)


_key_of = lru_cache(maxsize=256)(key_of)  # of a fold, whose tiles are many


def strides_of(fold: BlockFold) -> list[str]:
    """Names of the arguments that say how far rows lie apart, in order."""
    return list(dict.fromkeys(fold.stride_of(name) for name in (*fold.held, *fold.streamed, *fold.rows)))


def block_fold_arguments(fold: BlockFold) -> str:
    """The kernel's arguments: inputs, outputs, sizes, strides, flags, scalars, and which members of a group to fold."""
    whole = () if fold.seen is None else fold.seen.tensors
    parts = [f"in {'i32' if name in whole else 'f32'} p_{name}" for name in fold.tensor_inputs]
    parts += [f"{'inout' if fold.shared == 'held' else 'out'} f32 p_{name}" for name in fold.rows]
    parts += [f"out f32 p_{name}" for name in fold.values]
    parts += ["uint num_held, uint num_streamed, uint heads", *(f"uint {name}" for name in strides_of(fold))]
    parts += ["uint flags", *(f"float p_{name}" for name in fold.scalars)]
    return ", ".join(parts + ["uint members"] * (fold.shared == "held"))


@lru_cache(maxsize=256)
def block_fold_glsl(fold: BlockFold, continues: bool = False, written: tuple[int, Tile] | None = None) -> str:
    """The kernel's text. In it the fold's own names have a letter before them, so that none can be a word of GLSL: p_
    an argument, h_ a held row, n_ a number, x_ a product, s_ a state, a_ a sum of rows, v_ a result.

    Raises ValueError when it shall continue and what it writes are not its sums alone.
    """
    writer = _Writer(fold, continues)
    includes = glsl_includes(writer.roots())
    if "expr.glsl" not in includes and "exp.glsl" not in includes:
        includes = ("exp.glsl", *includes)
    mask = "see_all.glsl" if fold.seen is None else fold.seen.shader
    text = "".join(read_shader(name) for name in (*includes, "block_fold.glsl", mask))
    again = as_loops(_Writer(fold, continues, alone=True).again(), "    ") if fold.sums else ""
    if written is None:
        return text + "\nvoid main() {\n" + as_loops(writer.main(), "    ") + again + "}\n"
    head_dim, tile = written
    width = 2 if reads_pairs(head_dim, tile.spread) else 1
    vectors = -(-head_dim // (width * tile.spread)) * width
    sizes = {"ROWS": tile.rows, "BLOCK": BLOCK_ROWS, "SPREAD": tile.spread, "VECS": vectors, "TOUCHES": 0}
    return text + "\nvoid main() {\n" + written_out(writer.main(), sizes) + again + "}\n"


def _load_row(target: str, first: str, name: str) -> Lines:
    """Loads this lane's elements of a row that `_row_begins` told of, to target[first], ..."""
    return loop("c", "VECS", [f"LOAD({target}, {first} + c, {name}, c)"])


class _Writer:
    """Prints the fold of a tile; or, `alone`, of one row of it that all SPREAD lanes share, to which is added what it
    sees and nothing else."""

    def __init__(self, fold: BlockFold, continues: bool, alone: bool = False) -> None:
        self.fold, self.continues, self.alone = fold, continues, alone
        self.rows, self.at_once = ("1", "1") if alone else ("ROWS", "SPREAD")
        self.held_row, self.tile_row = ("chosen", "chosen") if alone else ("HELD_ROW(r)", "TILE_ROW(r, i)")
        states, sums = fold.walk.states, fold.sums
        if continues and not fold.can_continue:
            raise ValueError(
                f"block fold {fold.name!r} has more than sums that are written as they are: it cannot go on"
            )
        self.maxima = [state for state in states if state.merge == "max"]
        self.totals = [state for state in states if state.merge == "sum"]
        # The weights of pairs, each worked out once. What a maximum is of is -inf where nothing is seen.
        self.tops = [f"_top{i}" for i in range(len(self.maxima))]
        parts = [state.contribution for state in self.totals] + [one.weight for one in sums]
        self.weights = {root: f"w{i}" for i, root in enumerate(dict.fromkeys(parts))}
        self.factors = {one.factor: "" for one in sums if one.factor is not None}
        self.factors = {root: f"_f{i}" for i, root in enumerate(self.factors)}
        in_products = {name for pair in fold.products.values() for name in pair}
        self.held = [name for name in fold.held if name in in_products]
        self.multiplied = [name for name in fold.streamed if name in in_products]
        self.summed = list(dict.fromkeys(one.of for one in sums))
        self.many = {"held": "MANY_HEADS", "streamed": "FEW_HEADS"}
        if fold.shared == "held":
            self.many = {"held": "FEW_HEADS", "streamed": "MANY_HEADS"}
        self.names = self._names()
        self.unseen_of_row = self.unseen_of_pair = None
        if fold.unseen is not None:
            if set(named([fold.unseen])) <= fold.known_of_row:
                self.unseen_of_row = fold.unseen
            else:
                self.unseen_of_pair = fold.unseen

    def _names(self) -> dict[str, str]:
        """GLSL of what expressions may have in them, by name."""
        fold = self.fold
        places = {
            "held": f"float({self.held_row})",
            "held_end": f"float(HELD_OFFSET + int({self.held_row}))",
            "streamed": "float(block + int(j))",
            "streamed_end": "float(block + int(j) - HELD_OFFSET)",
        }
        index = {"held": "[r]", "streamed": "[j]", "head": ""}
        names = {name: f"args.p_{name}" for name in fold.scalars}
        names |= {name: f"n_{name}{index[kind]}" for name, kind in fold.numbers.items()}
        names |= {name: f"n_{name}[r]" for name in fold.dots}
        names |= {name: f"x_{name}[i]" for name in fold.products}
        names |= {name: f"{name}[i]" for name in self.tops}
        names |= {name: f"{name}[r]" for name in self.factors.values()}
        return names | {name: places[kind] for name, kind in fold.positions.items()}

    def roots(self) -> list[Expr]:
        """Every expression there is."""
        fold = self.fold
        found = [*fold.rows.values(), *fold.values.values(), *fold.start.values(), *fold.walk.results.values()]
        found += [*self.weights, *self.factors, *(state.contribution for state in self.maxima)]
        found += [state.aligned for state in self.totals if state.aligned is not None]
        return found + ([] if fold.unseen is None else [fold.unseen])

    def main(self) -> Lines:
        """All of it."""
        fold = self.fold
        lines = [
            *(f"BASE({name})" for name in dict.fromkeys((*fold.held, *fold.streamed, *fold.rows))),
            "const uint lane = gl_SubgroupInvocationID, my_lane = lane % SPREAD, my_dim = my_lane * WIDTH;",
            "const uint tile_rows = gl_SubgroupSize * ROWS;",
            "const uint tiles = (args.num_held + tile_rows - 1u) / tile_rows;",
            "const uint tile = balanced_tile(group_index() % tiles, tiles);",
            f"const uint batch = group_index() / tiles / {self.many['held']};",
            f"const uint held_head = group_index() / tiles % {self.many['held']};",
            "const int limit = seen_limit(batch);",
            "const int first = int(tile * tile_rows), past = min(first + int(tile_rows), int(args.num_held));",
            "const ivec2 visited = seen_of_rows(first, past, limit, batch);",
            "const int begin = visited.x / BLOCK * BLOCK, end = visited.y;",
            "const int my_row = int(lane % BLOCK);",
        ]
        if not fold.sums:
            return [*lines, *self._whole()]
        return [*lines, "bool again = false;", Braces(self._whole())]

    def again(self) -> Lines:
        """The tile folded once more where sums are not finite: each row in a turn of its own."""
        chosen = "const uint chosen = HELD_ROW(turn / SPREAD) - my_lane + turn % SPREAD;"
        return [Braces([chosen, *self._whole()], head="for (uint turn = 0u; again && turn < ROWS * SPREAD; turn++)")]

    def _whole(self) -> Lines:
        """From what is read of held rows to what is written of them."""
        if self.fold.shared == "streamed":
            lines = ["const uint streamed_head = held_head / GROUP;", *self._head_numbers("held_head")]
            return [*lines, *self._begin(), *self._walk(), *self._finish()]
        members = "for (uint member = 0; member < args.members >> 16; member++)"
        member = "const uint streamed_head = held_head * GROUP + (args.members & 0xFFFFu) + member;"
        walk = Braces([member, *self._head_numbers("streamed_head"), *self._walk()], head=members)
        return [*self._begin(), walk, *self._finish()]

    def _of_row(self, value: str) -> str:
        """What belongs to the row of register i, from the lane that has it."""
        return value if self.alone else f"OF_ROW({value}, i)"

    def _add_lanes(self, name: str) -> Lines:
        """Every lane gets its own row's sum over the lanes, in name[0]: each step adds halves of lanes and halves the
        rows. Of a row alone every lane gets the sum, to the same bits."""
        steps: Lines = []
        for half in (4, 2, 1):
            step: Lines = [f"{name}[0] += subgroupShuffleXor({name}[0], {half});"]
            if not self.alone:
                step = loop("i", str(half), [f"ADD_HALVES({name}, i, {half})"])
            steps += ["#if SPREAD == 8", *step, "#endif"] if half == 4 else step
        return steps

    def _assign(self, kind: str, roots: Mapping[str, Expr], more: Mapping[str, str] | None = None) -> list[str]:
        """Statements that assign values, declared first when a type is given."""
        text = glsl_statements(
            {name: simplify(root) for name, root in roots.items()}, "float", {**self.names, **(more or {})}
        )
        return [f"{kind} {', '.join(roots)};"] * bool(kind) + scoped(text)

    def _load(self, kind: str, target: str, name: str, place: str) -> list[str]:
        """Statements that read a number, declared first when a type is given; one may be left out at a call."""
        source = f"args.p_{name}.v[{place}]"
        if name not in self.fold.absent:
            return [f"{kind} {target} = {source};".lstrip()]
        bit = OPTIONAL_SHIFT + list(self.fold.absent).index(name)
        absent = self._assign(kind, {target: constant(self.fold.absent[name])})
        return [*absent, f"if ((args.flags >> {bit} & 1u) != 0u) {target} = {source};"]

    def _head_numbers(self, head: str) -> list[str]:
        return [line for name in self.fold.of_kind("head") for line in self._load("float", f"n_{name}", name, head)]

    def _row_begins(self, names: Iterable[str], side: str, row: str) -> list[str]:
        """Where this lane's dimensions of rows begin in memory."""
        place = f"(batch * args.num_{side} + {row}) * args.{{}} + {side}_head * HEAD_DIM + my_dim"
        return [f"ROW({name}, {place.format(self.fold.stride_of(name))})" for name in names]

    def _value_place(self, side: str, row: str) -> str:
        return f"(batch * {self.many[side]} + {side}_head) * args.num_{side} + {row}"

    def _begin(self) -> Lines:
        """What a lane holds before the first block, and which blocks there are."""
        fold = self.fold
        registers = [f"h_{name}[{self.rows} * {self.at_once} * VECS]" for name in self.held]
        registers += [f"a_{one.name}[{self.rows} * {self.at_once} * VECS]" for one in fold.sums]
        registers += [f"s_{state.name}[{self.rows}]" for state in fold.walk.states]
        registers += [f"n_{name}[{self.rows}]" for name in (*fold.of_kind("held"), *fold.dots)]
        dotted = dict.fromkeys(name for pair in fold.dots.values() for name in pair if name not in self.held)
        outputs = list(fold.rows) if self.continues else []
        load: Lines = [f"const uint row = min({self.tile_row}, args.num_held - 1u);"]
        load += self._row_begins([*self.held, *dotted, *outputs], "held", "row")
        for name in self.held:
            load += _load_row(f"h_{name}", "(r * SPREAD + i) * VECS", name)
        for name in dotted:
            load += [f"float h_{name}[VECS];", *_load_row(f"h_{name}", "0", name)]
        if outputs:
            for output, one in zip(outputs, fold.sums, strict=True):
                load += _load_row(f"a_{one.name}", "(r * SPREAD + i) * VECS", output)
        else:
            clear = [f"a_{one.name}[(r * SPREAD + i) * VECS + c] = 0.0;" for one in fold.sums]
            load += loop("c", "VECS", clear) if clear else []
        body: Lines = [f"float dot_{name}[{self.at_once}];" for name in fold.dots]
        for name, pair in fold.dots.items():
            a, b = (f"h_{one}[{'(r * SPREAD + i) * VECS + ' * (one in self.held)}c]" for one in pair)
            load.append(f"dot_{name}[i] = 0.0;")
            load += loop("c", "VECS", [f"dot_{name}[i] = fma({a}, {b}, dot_{name}[i]);"])
        body += loop("i", self.at_once, load)
        for name in fold.dots:
            body += [*self._add_lanes(f"dot_{name}"), f"n_{name}[r] = dot_{name}[0];"]
        body += [
            f"const uint real = min({self.held_row}, args.num_held - 1u);",
            f"const ivec2 range = seen_of_row(int({self.held_row}), limit, batch);",
            "low[r] = range.x;",
            "count[r] = max(range.y - range.x, 0);",
        ]
        for name in fold.of_kind("held"):
            body += self._load("", f"n_{name}[r]", name, self._value_place("held", "real"))
        for state in fold.walk.states:
            neutral = constant(0.0 if state.merge == "sum" else -math.inf)
            body += self._assign("", {f"s_{state.name}[r]": fold.start.get(state.name, neutral)})
        if self.unseen_of_row is not None:
            body += [*self._assign("bool", {"unseen": self.unseen_of_row}), "if (unseen) count[r] = 0;"]
        return [
            *([f"float {', '.join(registers)};"] if registers else []),
            f"int low[{self.rows}], count[{self.rows}];",
            *loop("r", self.rows, body),
            *["uint touched = 0u;"] * (not self.alone),
        ]

    def _walk(self) -> Lines:
        """The loop over blocks: products, what becomes of them, sums of rows."""
        fold = self.fold
        streamed = list(dict.fromkeys((*self.multiplied, *self.summed)))
        body = [] if self.alone else ["#if TOUCHES", *loop("t", "TOUCHES", self._touch(streamed)), "#endif"]
        if fold.of_kind("streamed"):
            body.append("const uint mine = uint(clamp(block + my_row, visited.x, end - 1));")
        for name in fold.of_kind("streamed"):
            body += self._load("float", f"my_{name}", name, self._value_place("streamed", "mine"))
        registers = [f"x_{name}[{self.rows} * BLOCK]" for name in fold.products]
        registers += [f"c_{name}[BLOCK * VECS]" for name in self.summed]
        body.append(f"float {', '.join(registers)};")
        body += loop("j", "BLOCK", [*self._load_streamed(self.multiplied), *loop("r", self.rows, self._multiply())])
        body += self._pairs()
        late = [name for name in self.summed if name not in self.multiplied]
        body += loop("j", "BLOCK", self._load_streamed(late)) if late else []
        if fold.sums:
            body += loop("r", self.rows, loop("i", self.at_once, self._add()))
        return [Braces(body, head="for (int block = begin; block < end; block += BLOCK)")]

    def _touch(self, names: list[str]) -> list[str]:
        """Loads of one element of each cache line of a later block: nothing else fetches rows that lie far apart."""
        lines = ["const uint line = t * SPREAD + my_lane;"]
        lines.append("const uint row = uint(min(block + AHEAD + int(line / LINES), end - 1));")
        for name in names:
            row = f"(batch * args.num_streamed + row) * args.{self.fold.stride_of(name)} + streamed_head * HEAD_DIM"
            lines.append(f"touched ^= floatBitsToUint(args.p_{name}.v[{row} + line % LINES * LINE]);")
        return lines

    def _load_streamed(self, names: list[str]) -> Lines:
        """Row j of a block. For one outside of what is seen the nearest is read: others may not have been written."""
        lines: Lines = [
            "const uint row = uint(clamp(block + int(j), visited.x, end - 1));",
            *self._row_begins(names, "streamed", "row"),
        ]
        for name in names:
            lines += [] if name in self.summed else [f"float c_{name}[VECS];"]
            lines += _load_row(f"c_{name}", self._of_block(name, "0"), name)
        return lines

    def _of_block(self, name: str, vector: str) -> str:
        """Index of a vector of streamed row j: rows that are summed stay for the whole block."""
        return f"j * VECS + {vector}" if name in self.summed else vector

    def _multiply(self) -> Lines:
        """Products of SPREAD held rows with row j: each lane sums up its own dimensions, then the lanes are added."""
        lines: Lines = []
        for name, (a, b) in self.fold.products.items():
            held = f"h_{a}[(r * SPREAD + i) * VECS + {{}}]"
            first = f"dot[i] = {held.format(0)} * c_{b}[{self._of_block(b, '0')}];"
            more = f"dot[i] = fma({held.format('c')}, c_{b}[{self._of_block(b, 'c')}], dot[i]);"
            chain = loop("i", self.at_once, [first, *loop("c", "VECS", [more], begin=1)])
            result = f"x_{name}[r * BLOCK + j] = dot[0];"
            lines.append(Braces([f"float dot[{self.at_once}];", *chain, *self._add_lanes("dot"), result]))
        return lines

    def _add(self) -> Lines:
        """Streamed rows times weights into the sums of held row i."""
        sums = self.fold.sums
        factors = dict.fromkeys(self.factors[one.factor] for one in sums if one.factor is not None)
        lines: Lines = [f"const float of_{name} = {self._of_row(f'{name}[r]')};" for name in factors]
        weights = dict.fromkeys(self.weights[one.weight] for one in sums)
        lines.append(f"float {', '.join(f'of_{name}[BLOCK]' for name in weights)};")
        lines += loop("j", "BLOCK", [f"of_{name}[j] = {self._of_row(f'{name}[r * BLOCK + j]')};" for name in weights])
        for one in sums:
            so_far = f"a_{one.name}[(r * SPREAD + i) * VECS + c]"
            times = "" if one.factor is None else f" * of_{self.factors[one.factor]}"
            add = f"fma(of_{self.weights[one.weight]}[j], c_{one.of}[j * VECS + c], sum)"
            add = f"sum = sees[j] ? {add} : sum;" if self.alone else f"sum = {add};"
            each = [f"float sum = {so_far}{times};", *loop("j", "BLOCK", [add]), f"{so_far} = sum;"]
            lines += loop("c", "VECS", each)
        return lines

    def _pairs(self) -> Lines:
        """From the products of a block to its weights and to the states with it in them."""
        fold = self.fold
        registers = [f"{name}[{self.rows} * BLOCK]" for name in (*self.tops, *self.weights.values())]
        registers += [f"{name}[{self.rows}]" for name in self.factors.values()]
        numbers = fold.of_kind("streamed")
        registers += [f"n_{name}[BLOCK]" for name in numbers]
        lines: Lines = [f"float {', '.join(registers)};"] if registers else []
        lines += ["bool sees[BLOCK];"] * self.alone
        if numbers:
            spread = "SHUFFLED" if self.alone else "FROM_LANE"
            lines += loop("j", "BLOCK", [f"n_{name}[j] = {spread}(my_{name}, j);" for name in numbers])
        seen = ["const uint i = r * BLOCK + j;", "bool seen = uint(block + int(j) - low[r]) < uint(count[r]);"]
        if self.unseen_of_pair is not None:
            seen += [*self._assign("bool", {"unseen": self.unseen_of_pair}), "seen = seen && !unseen;"]
        body: Lines = []
        new: dict[str, str] = {}
        if self.maxima:
            each = [*seen, *self._assign("float", {f"m_{state.name}": state.contribution for state in self.maxima})]
            for top, state in zip(self.tops, self.maxima, strict=True):
                body.append(f"float v_{state.name} = s_{state.name}[r];")
                each.append(f"{top}[i] = seen ? m_{state.name} : NEGATIVE_INFINITY;")
                each.append(f"v_{state.name} = max(v_{state.name}, {top}[i]);")
                new |= {state.name: f"v_{state.name}", f"old_{state.name}": f"s_{state.name}[r]"}
            body += loop("j", "BLOCK", each)
        for root, name in self.factors.items():
            body += self._assign("", {f"{name}[r]": root}, new)
        body += [f"float b_{state.name} = 0.0;" for state in self.totals]
        if self.weights:
            contributions = {
                state.contribution: variable(top) for top, state in zip(self.tops, self.maxima, strict=True)
            }
            roots = substitute(self.weights, contributions)
            names = [f"p{i}" for i in range(len(roots))]
            each = [*seen, *self._assign("float", dict(zip(names, roots, strict=True)), new)]
            each += [f"w{i}[i] = seen ? {name} : 0.0;" for i, name in enumerate(names)]
            each += ["sees[j] = seen;"] * self.alone
            each += [f"b_{state.name} += {self.weights[state.contribution]}[i];" for state in self.totals]
            body += loop("j", "BLOCK", each)
        for state in self.totals:
            so_far: Expr = variable(state.name)
            if state.aligned is not None:
                known = {root: variable(name) for root, name in self.factors.items()}
                (so_far,) = substitute([state.aligned], known)
            names_now = {**new, state.name: f"s_{state.name}[r]", "_block": f"b_{state.name}"}
            body += self._assign("", {f"s_{state.name}[r]": plus(so_far, variable("_block"))}, names_now)
        body += [f"s_{state.name}[r] = v_{state.name};" for state in self.maxima]
        return lines + (loop("r", self.rows, body) if body else [])

    def _finish(self) -> Lines:
        """What is written of the held rows."""
        fold = self.fold
        known = {state.name: f"s_{state.name}[r]" for state in fold.walk.states}
        body: Lines = []
        for name, result in fold.walk.results.items():
            body += self._assign("float", {f"v_{name}": result}, known)
            known[name] = f"v_{name}"
        values: list[str] = []
        for name, root in fold.values.items():
            values += self._assign("", {f"args.p_{name}.v[{self._value_place('held', self.held_row)}]": root}, known)
        if values:
            body.append(Braces(values, head=f"if ({self.held_row} < args.num_held)"))
        body += loop("i", self.at_once, self._write_row(known)) if fold.rows else []
        write = loop("r", self.rows, body)
        if self.alone:
            return write
        never = "if (touched == 1u && args.flags == 0xFFFFFFFFu) return;  // without it the loads would be left out"
        if not fold.sums:
            return [never, *write]
        largest = [f"LARGEST(a_{one.name}[(r * SPREAD + i) * VECS + c])" for one in fold.sums]
        test = loop("r", self.rows, loop("i", self.at_once, loop("c", "VECS", largest)))
        ask = "again = (args.flags & FOLD_ONCE) == 0u && subgroupMax(top) >= 0x7F800000u;"
        return [never, "uint top = 0u;", *test, ask, Braces(write, head="if (!again)")]

    def _write_row(self, known: Mapping[str, str]) -> Lines:
        """Row i, of which the lanes have its sums, and one lane its states and numbers."""
        fold = self.fold
        used = {name for op in ("variable", "whole") for name in named(fold.rows.values(), op)}
        read = [name for name in fold.held if name in used and name not in self.held]
        everywhere = {*fold.scalars, *fold.of_kind("head")}
        of_lanes = {name: place for name, place in {**self.names, **known}.items() if name in used - everywhere}
        lines = [f"const float of_{name} = {self._of_row(place)};" for name, place in of_lanes.items()]
        elements = {name: f"of_{name}" for name in of_lanes}
        for name in fold.held:
            inside = name in self.held
            elements[name] = f"h_{name}[(r * SPREAD + i) * VECS + c]" if inside else f"ELEMENT({name}, c)"
        elements |= {one.name: f"a_{one.name}[(r * SPREAD + i) * VECS + c]" for one in fold.sums}
        each = []
        for name, root in fold.rows.items():
            each += self._assign("", {f"ELEMENT({name}, c)": root}, elements)
        begins = [f"const uint row = {self.tile_row};", *self._row_begins([*read, *fold.rows], "held", "row")]
        write = loop("c", "VECS", [Braces(each, head="if (HAS_DIM(c))")])
        return [*lines, Braces([*begins, *write], head=f"if ({self.tile_row} < args.num_held)")]
