"""The functions of programs as hosts read them: exports, members of joint exports, formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from jax import export

from pathways_ray.errors import ProgramRefused
from pathways_ray.formulas.calls import FormulaCall
from pathways_ray.formulas.formula import Formula, is_formulas, unpacked
from pathways_ray.ir.types import SliceType
from pathways_ray.joint_exports import Joint, Member, Packed, is_joint_export

Called: TypeAlias = export.Exported | Member | FormulaCall
"""A function that a recipe names."""

Read: TypeAlias = export.Exported | Joint | tuple[Formula, ...]
"""One function, or several that came as its members."""


def lines_among(calls: Mapping[str, Called]) -> frozenset[str]:
    """The names of those functions that are lines (`Formula.is_line`)."""
    return frozenset(name for name, call in calls.items() if isinstance(call, FormulaCall) and call.formula.is_line)


def check_meshes(mesh: SliceType, calls: Mapping[str, Called]) -> None:
    """Raises `ProgramRefused` for a formula that says how values lie on another mesh than that of its slice."""
    for call in calls.values():
        if isinstance(call, FormulaCall):
            call.check_mesh(mesh.axes, mesh.shape)


def read(name: str, code: bytes) -> Read:
    """The function of a name, or what has it as a member. The sandbox has read `code` before, unless it has formulas.

    Raises:
        ProgramRefused: it has no such members, or others than the sandbox has seen.
    """
    is_member = "#" in name
    if is_formulas(code) and is_member:
        return unpacked(code)
    if is_member:
        return Joint(Packed.read(code))
    if is_joint_export(code) or is_formulas(code):
        raise ProgramRefused(f"{name[:80]} has members, and a part of the program names none of them")
    return export.deserialize(bytearray(code))


def function_in(found: Read, name: str) -> Called:
    """The function of a name in what was read for it. Raises `ProgramRefused` for a member that there is not, and for a
    formula that makes no sense."""
    _, _, number = name.partition("#")
    if isinstance(found, Joint):
        return found.member(number)
    if not isinstance(found, tuple):
        return found
    if not (number.isascii() and number.isdigit() and int(number) < len(found)):
        raise ProgramRefused(f"of {len(found)} formulas none has the number {number[:20]!r}")
    return FormulaCall.of(found[int(number)])
