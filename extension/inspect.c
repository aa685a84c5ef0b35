/*
 * What pg_replication_slots does not show: for each slot its state in memory, on disk, and the files it depends on.
 *
 * Read only. Shared memory is copied first, under the locks that it needs; files are read afterwards, so that
 * no lock waits for a disk.
 */
#include "tuskline.h"

#include "access/htup_details.h"
#include "commands/dbcommands.h"
#include "funcapi.h"
#include "port/pg_crc32c.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/pg_lsn.h"
#include "utils/tuplestore.h"

PG_FUNCTION_INFO_V1(tuskline_inspect);

/* The layout of a slot's state file, the same from 11 to 18 but for the length of its data (slot.c). */
#define STATE_MAGIC 0x1051CA1

typedef struct StateFile
{
	uint32		magic;
	pg_crc32c	checksum;
	uint32		version;
	uint32		length;
	ReplicationSlotPersistentData data;
} StateFile;

enum Column
{
	SLOT_NAME,
	PLUGIN,
	DATABASE,
	ACTIVE_PID,
	PERSISTENCY,
	RESTART_LSN,
	CONFIRMED_FLUSH_LSN,
	XMIN,
	CATALOG_XMIN,
	EFFECTIVE_XMIN,
	EFFECTIVE_CATALOG_XMIN,
	TWO_PHASE,
	TWO_PHASE_AT,
	SYNCED,
	INVALIDATION,
	DIRTY,
	SAVED_RESTART_LSN,
	SAVED_CONFIRMED_FLUSH_LSN,
	SAVED_CATALOG_XMIN,
	SNAPSHOT_PRESENT,
	SNAPSHOT_COMPLETE,
	FOREIGN_SNAPSHOT_AFTER,
	WAL_PRESENT,
	MARKER,
	MAPPINGS_COMPLETE,
	COLUMNS
};

typedef struct Row
{
	Datum		values[COLUMNS];
	bool		nulls[COLUMNS];
} Row;

static void
put(Row *row, enum Column column, Datum value)
{
	row->values[column] = value;
	row->nulls[column] = false;
}

static void
put_lsn(Row *row, enum Column column, XLogRecPtr lsn)
{
	if (!XLogRecPtrIsInvalid(lsn))
		put(row, column, LSNGetDatum(lsn));
}

static void
put_xid(Row *row, enum Column column, TransactionId xid)
{
	if (TransactionIdIsValid(xid))
		put(row, column, TransactionIdGetDatum(xid));
}

/* What a restart of the server would find; false while the slot is created or dropped, or if the file is damaged. */
static bool
read_state(const char *slot_name, StateFile *state)
{
	char		path[MAXPGPATH];
	pg_crc32c	checksum;
	ssize_t		length;

	snprintf(path, sizeof(path), "pg_replslot/%s/state", slot_name);
	length = read_beginning(path, state, sizeof(StateFile), NULL);
	if (length < 0)
		return false;
	if (length == sizeof(StateFile) && state->magic == STATE_MAGIC &&
		state->length == sizeof(ReplicationSlotPersistentData))
	{
		INIT_CRC32C(checksum);
		COMP_CRC32C(checksum, &state->version, sizeof(StateFile) - offsetof(StateFile, version));
		FIN_CRC32C(checksum);
		if (EQ_CRC32C(checksum, state->checksum))
			return true;
	}
	ereport(WARNING,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("file \"%s\" is damaged", path),
			 errhint("The server cannot start with this file. Drop the slot, and create it again.")));
	return false;
}

static const char *
persistency(const ReplicationSlot *slot)
{
	switch (slot->data.persistency)
	{
		case RS_PERSISTENT:
			return "persistent";
		case RS_EPHEMERAL:
			return "ephemeral";
		case RS_TEMPORARY:
			return "temporary";
	}
	return "unknown";
}

/* `foreign`: newest_foreign_snapshot(); not used on a server that writes WAL itself. */
static void
put_snapshots(Row *row, XLogRecPtr restart_lsn, XLogRecPtr foreign)
{
	put(row, SNAPSHOT_PRESENT, BoolGetDatum(snapshot_present(restart_lsn)));
	put(row, SNAPSHOT_COMPLETE, BoolGetDatum(snapshot_complete(restart_lsn)));
	if (RecoveryInProgress())
		put(row, FOREIGN_SNAPSHOT_AFTER, BoolGetDatum(foreign > restart_lsn));
}

static void
put_files(Row *row, const ReplicationSlot *slot, XLogSegNo oldest_segment, XLogRecPtr foreign)
{
	const char *name = NameStr(slot->data.name);
	char		marker[MARKER_LENGTH + 1];
	StateFile	state;

	if (read_state(name, &state))
	{
		put_lsn(row, SAVED_RESTART_LSN, state.data.restart_lsn);
		put_lsn(row, SAVED_CONFIRMED_FLUSH_LSN, state.data.confirmed_flush);
		put_xid(row, SAVED_CATALOG_XMIN, state.data.catalog_xmin);
	}
	if (!XLogRecPtrIsInvalid(slot->data.restart_lsn))
	{
		XLogSegNo	segment;

		XLByteToSeg(slot->data.restart_lsn, segment, wal_segment_size);
		put(row, WAL_PRESENT, BoolGetDatum(segment >= oldest_segment));
		if (SlotIsLogical(slot))
		{
			put_snapshots(row, slot->data.restart_lsn, foreign);
			put(row, MAPPINGS_COMPLETE, BoolGetDatum(mappings_complete(name)));
		}
	}
	switch (read_marker(name, marker))
	{
		case MARKER_NONE:
			break;
		case MARKER_READ:
			put(row, MARKER, CStringGetTextDatum(marker));
			break;
		case MARKER_DAMAGED:
			ereport(WARNING,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("file \"pg_replslot/%s/tuskline_marker\" does not contain a valid incarnation id", name),
					 errhint("Move the file away. The copies that depend on it are then proven again.")));
	}
}

static void
fill(Row *row, ReplicationSlot *slot, XLogSegNo oldest_segment, XLogRecPtr foreign)
{
	const char *invalidation = compat_invalidation(&slot->data);

	memset(row->nulls, true, sizeof(row->nulls));
	put(row, SLOT_NAME, NameGetDatum(&slot->data.name));
	if (SlotIsLogical(slot))
	{
		char	   *database = get_database_name(slot->data.database);

		put(row, PLUGIN, NameGetDatum(&slot->data.plugin));
		if (database != NULL)
			put(row, DATABASE, DirectFunctionCall1(namein, CStringGetDatum(database)));
	}
	if (slot->active_pid != 0)
		put(row, ACTIVE_PID, Int32GetDatum(slot->active_pid));
	put(row, PERSISTENCY, CStringGetTextDatum(persistency(slot)));
	put_lsn(row, RESTART_LSN, slot->data.restart_lsn);
	put_lsn(row, CONFIRMED_FLUSH_LSN, slot->data.confirmed_flush);
	put_xid(row, XMIN, slot->data.xmin);
	put_xid(row, CATALOG_XMIN, slot->data.catalog_xmin);
	put_xid(row, EFFECTIVE_XMIN, slot->effective_xmin);
	put_xid(row, EFFECTIVE_CATALOG_XMIN, slot->effective_catalog_xmin);
	put(row, TWO_PHASE, BoolGetDatum(compat_two_phase(&slot->data)));
	put_lsn(row, TWO_PHASE_AT, compat_two_phase_at(&slot->data));
	put(row, SYNCED, BoolGetDatum(compat_synced(&slot->data)));
	if (invalidation != NULL)
		put(row, INVALIDATION, CStringGetTextDatum(invalidation));
	put(row, DIRTY, BoolGetDatum(slot->dirty));
	put_files(row, slot, oldest_segment, foreign);
}

/* Copy the slots in use, or the one of that name; their number. */
static int
copy_slots(const char *name, ReplicationSlot *copies)
{
	int			count = 0;

	LWLockAcquire(ReplicationSlotControlLock, LW_SHARED);
	for (int i = 0; i < max_replication_slots; i++)
	{
		ReplicationSlot *slot = &ReplicationSlotCtl->replication_slots[i];

		if (!slot->in_use || (name != NULL && strcmp(NameStr(slot->data.name), name) != 0))
			continue;
		SpinLockAcquire(&slot->mutex);
		copies[count++] = *slot;
		SpinLockRelease(&slot->mutex);
	}
	LWLockRelease(ReplicationSlotControlLock);
	return count;
}

/* inspect(slot_name): a row for each slot, or for the one of that name. */
Datum
tuskline_inspect(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	const char *name = PG_ARGISNULL(0) ? NULL : NameStr(*PG_GETARG_NAME(0));
	XLogRecPtr	oldest_needed = PG_UINT64_MAX;
	XLogSegNo	oldest_segment = 0;
	XLogRecPtr	foreign;
	ReplicationSlot *slots;
	TupleDesc	shape;
	Tuplestorestate *rows;
	MemoryContext before;
	int			count;

	if (result == NULL || !IsA(result, ReturnSetInfo) || !(result->allowedModes & SFRM_Materialize))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("set-returning function inspect() called in a context that cannot accept a set"),
				 errhint("Call inspect() in the FROM clause.")));
	if (get_call_result_type(fcinfo, NULL, &shape) != TYPEFUNC_COMPOSITE || shape->natts != COLUMNS)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_FUNCTION_DEFINITION),
				 errmsg("inspect() was declared for another version of this library"),
				 errhint("Run ALTER EXTENSION tuskline UPDATE.")));
	before = MemoryContextSwitchTo(result->econtext->ecxt_per_query_memory);
	shape = CreateTupleDescCopy(shape);
	rows = tuplestore_begin_heap((result->allowedModes & SFRM_Materialize_Random) != 0, false, work_mem);
	result->returnMode = SFRM_Materialize;
	result->setResult = rows;
	result->setDesc = shape;
	MemoryContextSwitchTo(before);

	if (max_replication_slots == 0)
		return (Datum) 0;
	slots = palloc(max_replication_slots * sizeof(ReplicationSlot));
	count = copy_slots(name, slots);
	for (int i = 0; i < count; i++)
		if (!XLogRecPtrIsInvalid(slots[i].data.restart_lsn))
			oldest_needed = Min(oldest_needed, slots[i].data.restart_lsn);
	if (oldest_needed != PG_UINT64_MAX)
		oldest_segment = wal_oldest_segment(oldest_needed);
	foreign = RecoveryInProgress() ? newest_foreign_snapshot() : InvalidXLogRecPtr;
	for (int i = 0; i < count; i++)
	{
		Row			row;

		fill(&row, &slots[i], oldest_segment, foreign);
		tuplestore_putvalues(rows, shape, row.values, row.nulls);
	}
	return (Datum) 0;
}
