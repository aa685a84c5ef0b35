"""Folds as Arrow tables, to be written by one task and read by another."""

from typing import Any

import numpy as np
import pyarrow as pa

from spark_consumers.fold.keyed import Fold
from spark_consumers.fold.multiset import MultisetFold

_TRUNCATED, _KEY, _PROVENANCE, _EMPTIED = b"truncated", b"key", b"provenance", b"emptied"


def fold_to_table(fold: Fold | MultisetFold) -> pa.Table:
    """One column each for what the fold holds; `from_table` reads it back."""
    arrays: dict[str, Any] = {f"c{i}": column for i, column in enumerate(fold.columns)}
    if isinstance(fold, MultisetFold):
        arrays["delta"] = pa.array(fold.delta)
    else:
        arrays["existed"] = pa.array(fold.existed)
        arrays["state"] = pa.array(fold.state)
        if fold.unset is not None and fold.source is not None:
            arrays |= {f"u{i}": pa.array(fold.unset[:, i]) for i in range(len(fold.columns))}
            arrays |= {f"s{i}": column for i, column in enumerate(fold.source)}
    table = pa.table(arrays)
    provenance = fold.provenance if isinstance(fold, MultisetFold) else 0
    key = () if isinstance(fold, MultisetFold) else fold.key
    about = {_TRUNCATED: b"1" if fold.truncated else b"0", _PROVENANCE: str(provenance).encode()}
    if isinstance(fold, Fold) and fold.emptied is not None:
        about[_EMPTIED] = ",".join(map(str, fold.emptied)).encode()
    return table.replace_schema_metadata({**about, _KEY: ",".join(map(str, key)).encode()})


def fold_from_table(table: pa.Table) -> Fold | MultisetFold:
    """The fold that `fold_to_table` wrote."""
    about = table.schema.metadata
    truncated = about[_TRUNCATED] == b"1"
    key = tuple(int(position) for position in about[_KEY].split(b",") if position)

    def column(name: str) -> pa.Array:
        return pa.concat_arrays(table.column(name).chunks) if len(table) else _empty(table, name)

    width = sum(name.startswith("c") for name in table.column_names)
    columns = [column(f"c{i}") for i in range(width)]
    if not key:
        return MultisetFold(
            truncated, columns, np.asarray(column("delta")), int(about[_PROVENANCE])
        )
    unset = source = None
    if "u0" in table.column_names:
        unset = np.column_stack([_bools(column(f"u{i}")) for i in range(width)])
        source = [column(f"s{i}") for i in range(len(key))]
    state = np.asarray(column("state"))
    emptied = None
    if _EMPTIED in about:
        time, lsn = map(int, about[_EMPTIED].split(b","))
        emptied = time, lsn
    return Fold(key, truncated, _bools(column("existed")), state, columns, unset, source, emptied)


def _empty(table: pa.Table, name: str) -> pa.Array:
    return pa.array([], table.schema.field(name).type)


def _bools(array: pa.Array) -> Any:
    return array.to_numpy(zero_copy_only=False).astype(np.bool_)
