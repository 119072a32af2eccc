"""The custom calls that programs may use, with what each takes and gives.

A kernel behind a custom call trusts its caller: jaxlib's `trsm` reads as large a matrix from its first operand as its
second one implies, all of LAPACK's copy their operand into a result of whatever size it is, and `gesdd` leaves `u` and
`vt` as they were allocated when it is told not to compute them. On hosts, what lies behind the end of an array may be
another client's. So a call passes only in the forms in which JAX itself emits it.

Signatures: `T[m,n] -> T[m,n] i32[k]` means one operand and two results behind the same batch dimensions. `k` is the
smaller one of `m` and `n`, `T` is the element type of the target, `R` and `C` are its real and its complex type, and
`T()` is a scalar without batch dimensions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Sizes: TypeAlias = Mapping[str, int]


@dataclass(frozen=True)
class Form:
    """One form of a custom call.

    Args:
        signature: what it takes and gives.
        attributes: the attributes that its kernel reads, as MLIR writes them, each with the values that fit the sizes.
        aliases: (result, operand) pairs that share their memory.
        unwritten: results that the kernel leaves as they were allocated. Nothing may use them.
        guarded: results that the kernel may leave so when its last result, `info`, is not 0. They may be used only by
            a `select` that takes something else then.
        row_major: whether matrices lie row by row, not column by column.
        where: what must hold for the sizes.
        element_types: the types that `T` may be.
    """

    signature: str
    attributes: Mapping[str, tuple[str, ...] | Callable[[Sizes], str]] = field(default_factory=dict)
    aliases: tuple[tuple[int, int], ...] = ()
    unwritten: tuple[int, ...] = ()
    guarded: tuple[int, ...] = ()
    row_major: bool = False
    where: Callable[[Sizes], bool] = lambda _: True
    element_types: tuple[str, ...] = ("f32", "f64", "complex<f32>", "complex<f64>")


def _letters(choice: str) -> tuple[str, ...]:
    """The values of an attribute that is one letter out of several."""
    return tuple(f"{ord(letter)} : ui8" for letter in choice)


_TRUE, _FALSE, _EITHER = ("true",), ("false",), ("true", "false")
_FIRST = ((0, 0),)


def _reflectors(d: Sizes) -> bool:
    return d["t"] <= d["n"] <= d["m"]


def _is_wide(d: Sizes) -> bool:
    return d["m"] < d["n"]


def _is_tall(d: Sizes) -> bool:
    return d["m"] >= d["n"]


def _is_any(_: Sizes) -> bool:
    return True


_LU = Form("T[m,n] -> T[m,n] i32[k] i32[]", aliases=_FIRST)
_QR = Form("T[m,n] -> T[m,n] T[k]", aliases=_FIRST)
_REFLECTORS = Form("T[m,n] T[t] -> T[m,n]", aliases=_FIRST, where=_reflectors)

_LAPACK: dict[tuple[str, ...], tuple[Form, ...]] = {
    ("spotrf", "dpotrf", "cpotrf", "zpotrf"): (
        Form("T[n,n] -> T[n,n] i32[]", {"uplo": _letters("LU")}, aliases=_FIRST),
    ),
    ("sgetrf", "dgetrf", "cgetrf", "zgetrf"): (_LU,),
    ("sgeqrf", "dgeqrf", "cgeqrf", "zgeqrf"): (_QR,),
    ("sorgqr", "dorgqr", "cungqr", "zungqr"): (_REFLECTORS,),
    ("ssyevd", "dsyevd", "cheevd", "zheevd"): (
        Form(
            "T[n,n] -> T[n,n] R[n] i32[]",
            {"mode": _letters("V"), "uplo": _letters("LU")},
            aliases=_FIRST,
            guarded=(1,),
        ),
    ),
    ("sgesdd", "dgesdd", "cgesdd", "zgesdd"): (
        Form(
            "T[m,n] -> T[m,n] R[k] T[m,m] T[n,n] i32[]",
            {"mode": _letters("A")},
            aliases=_FIRST,
            guarded=(1, 2, 3),
        ),
        Form(
            "T[m,n] -> T[m,n] R[k] T[m,k] T[k,n] i32[]",
            {"mode": _letters("S")},
            aliases=_FIRST,
            guarded=(1, 2, 3),
        ),
        *(
            Form(
                f"T[m,n] -> T[m,n] R[k] {unwritten} i32[]",
                {"mode": _letters("N")},
                aliases=_FIRST,
                unwritten=(2, 3),
                guarded=(1,),
            )
            for unwritten in ("T[m,m] T[n,n]", "T[m,k] T[k,n]")
        ),
    ),
    # Of a matrix that is not finite these do not look at anything; JAX uses eigenvalues of `gees` never.
    **{
        names: tuple(
            Form(
                f"T[n,n] -> {values} C[n,n] C[n,n] i32[]",
                {"compute_left": _letters(left), "compute_right": _letters(right)},
                unwritten=(*((count,) if left == "N" else ()), *((count + 1,) if right == "N" else ())),
                guarded=tuple(range(count + 2)),
            )
            for left, right in itertools.product("NV", repeat=2)
        )
        for names, values, count in ((("sgeev", "dgeev"), "T[n] T[n]", 2), (("cgeev", "zgeev"), "T[n]", 1))
    },
    **{
        names: tuple(
            Form(
                f"T[n,n] -> T[n,n] T[n,n] {values} i32[] i32[]",
                {"mode": _letters(mode), "sort": _letters("N")},
                aliases=_FIRST,
                unwritten=(*((1,) if mode == "N" else ()), *range(2, 3 + count)),
                guarded=(1,),
            )
            for mode in "NV"
        )
        for names, values, count in ((("sgees", "dgees"), "T[n] T[n]", 2), (("cgees", "zgees"), "T[n]", 1))
    },
    ("ssytrd", "dsytrd", "chetrd", "zhetrd"): (
        Form(
            "T[n,n] -> T[n,n] R[n] R[n-1] T[n-1] i32[]",
            {"uplo": _letters("LU")},
            aliases=_FIRST,
            guarded=(1, 2, 3),
        ),
    ),
    ("sgehrd", "dgehrd", "cgehrd", "zgehrd"): (
        Form(
            "T[n,n] -> T[n,n] T[n-1] i32[]",
            {"low": ("1 : i32",), "high": lambda d: f"{d['n']} : i32"},
            aliases=_FIRST,
            guarded=(1,),
        ),
    ),
    ("strsm", "dtrsm", "ctrsm", "ztrsm"): tuple(
        Form(
            f"T[{size},{size}] T[m,n] -> T[m,n]",
            {"side": _letters(side), "uplo": _letters("LU"), "trans_x": _letters("NTC"), "diag": _letters("NU")},
            aliases=((0, 1),),
        )
        for side, size in (("L", "m"), ("R", "n"))
    ),
    ("sgtsv", "dgtsv", "cgtsv", "zgtsv"): (
        Form(
            "T[m] T[m] T[m] T[m,n] -> T[m] T[m] T[m] T[m,n] i32[]",
            aliases=((0, 0), (1, 1), (2, 2), (3, 3)),
        ),
    ),
}

_GPU: dict[str, tuple[Form, ...]] = {
    "solver_getrf_ffi": (_LU,),
    "solver_geqrf_ffi": (_QR,),
    "solver_orgqr_ffi": (_REFLECTORS,),
    "solver_potrf_ffi": (Form("T[n,n] -> T[n,n] i32[]", {"lower": _EITHER}, aliases=_FIRST),),
    "solver_syevd_ffi": (
        Form(
            "T[n,n] -> T[n,n] R[n] i32[]",
            {"lower": _EITHER, "algorithm": ("0 : ui8", "1 : ui8", "2 : ui8")},
            aliases=_FIRST,
            guarded=(1,),
        ),
    ),
    # A matrix that is wider than high is computed as its transpose.
    **{
        f"solver_{name}_ffi": tuple(
            Form(
                f"T[m,n] -> T[m,n] R[k] {vectors} i32[]",
                {"compute_uv": compute, "full_matrices": full, "transposed": _TRUE if wide else _FALSE},
                aliases=_FIRST,
                unwritten=() if compute == _TRUE else (2, 3),
                guarded=(1, 2, 3) if compute == _TRUE else (1,),
                row_major=wide,
                where=_is_wide if wide else _is_any if name == "gesdd" else _is_tall,
            )
            for wide in ((False,) if name == "gesdd" else (False, True))
            for compute, full, vectors in (
                (_TRUE, _TRUE, "T[n,n] T[m,m]" if wide else "T[m,m] T[n,n]"),
                (_TRUE, _FALSE, "T[k,n] T[m,k]" if wide else "T[m,k] T[k,n]"),
                (_FALSE, _EITHER, "T() T()"),
            )
        )
        for name in ("gesvd", "gesdd")
    },
    "solver_gesvdj_ffi": tuple(
        Form(
            f"T[m,n] -> T[m,n] R[k] {vectors} i32[]",
            {"compute_uv": compute, "full_matrices": full},
            aliases=_FIRST,
            unwritten=() if compute == _TRUE else (2, 3),
            guarded=(1, 2, 3) if compute == _TRUE else (1,),
        )
        for full, vectors in ((_TRUE, "T[m,m] T[n,n]"), (_FALSE, "T[m,k] T[n,k]"))
        for compute in (_TRUE, _FALSE)
    ),
    "solver_sytrd_ffi": (
        Form("T[n,n] -> T[n,n] R[n] R[n-1] T[n-1] i32[]", {"lower": _EITHER}, aliases=_FIRST, guarded=(1, 2, 3)),
    ),
    "sparse_gtsv2_ffi": (Form("T[m] T[m] T[m] T[m,n] -> T[m,n]", aliases=((0, 3),), where=lambda d: d["m"] >= 3),),
    "_lu_pivots_to_permutation": (
        Form("T[t] -> T[m]", row_major=True, where=lambda d: d["t"] <= d["m"], element_types=("i32",)),
    ),
    "_threefry2x32_ffi": (Form("T[] T[] T[] T[] -> T[] T[]", element_types=("ui32",)),),
}

_LAPACK_TYPES = {"s": "f32", "d": "f64", "c": "complex<f32>", "z": "complex<f64>"}


def _of_lapack(form: Form, name: str) -> Form:
    return Form(**{**form.__dict__, "element_types": (_LAPACK_TYPES[name[0]],)})


KERNELS: dict[str, tuple[Form, ...]] = {
    f"lapack_{name}_ffi": tuple(_of_lapack(form, name) for form in forms)
    for names, forms in _LAPACK.items()
    for name in names
} | {f"{prefix}{name}": forms for prefix in ("cu", "hip") for name, forms in _GPU.items()}
"""Kernels of jaxlib, which get pointers."""

_FLOATS = ("f16", "bf16", "f32", "f64", "complex<f32>", "complex<f64>")

EXPANDED: dict[str, tuple[Form, str, int]] = {
    "Eigh": (Form("T[n,n] -> T[n,n] R[n]", element_types=_FLOATS), r"[01],[01],\d{1,4},\d+(\.\d+)?(e-?\d+)?", 1),
    "Qr": (Form("T[m,n] -> T[m,n] T[k]", element_types=_FLOATS), "", 1),
    "ProductOfElementaryHouseholderReflectors": (
        Form("T[m,n] T[t] -> T[m,n]", where=_reflectors, element_types=_FLOATS),
        "",
        1,
    ),
    "LuDecomposition": (Form("T[m,n] -> T[m,n] i32[k] i32[m]", element_types=_FLOATS), "", 2),
}
"""What XLA replaces with operations of its own: form, pattern of `backend_config`, and `api_version`."""

OTHERS = ("ApproxTopK", "annotate_device_placement")
"""Custom calls with rules of their own (`custom_call_rules`).

Not among all these, though `jax.export` knows them: those that run a client's own kernels (`tpu_custom_call`,
`mosaic_gpu_v2`) or leave the computation (`tf.call_tf_function`), those whose shapes are known at run time only,
`AllocateBuffer`, which gives memory as its last owner left it, and `Sharding`, `SPMDFullToShardShape` and
`SPMDShardToFullShape`, which JAX emits without Shardy only: they would make a region for each device by itself that
`uniformity` does not see."""

_ARRAY = re.compile(r"(T|R|C|i32)(?:\[([^\]]*)\]|(\(\)))")


@dataclass(frozen=True)
class ArrayForm:
    """An operand or result: its type's letter, and its dimensions behind the batch (None for a scalar without one)."""

    letter: str
    dims: tuple[str, ...] | None


def parsed(signature: str) -> tuple[tuple[ArrayForm, ...], tuple[ArrayForm, ...]]:
    """The operands and the results of a signature."""
    found = [
        tuple(
            ArrayForm(letter, None if scalar else tuple(filter(None, dims.split(","))))
            for letter, dims, scalar in _ARRAY.findall(side)
        )
        for side in signature.split("->")
    ]
    return found[0], found[1]
