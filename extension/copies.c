/*
 * Creates, moves, renames and drops copies of logical slots on a standby.
 *
 * Safety, in the order of a copy's life:
 *
 * - reserve: the copy is ephemeral until it is complete, so that a crash or an error leaves nothing. Its
 *   restart_lsn is published before its WAL is checked, and its catalog_xmin is chosen while no process can move the
 *   horizon, so that the WAL and rows that existed at the check remain.
 * - set_fields: the three fields change together under the slot's spinlock and are on disk before the effective
 *   xmin follows, so that no row is released that could be needed again after a crash.
 * - A copy is identified by its incarnation id (marker.c), not by its name; it has the id before it is persistent. Only
 *   a slot with one is dropped, unless the caller specifies any_slot.
 * - Files that are removed by slots' positions may have been removed before reserve: the snapshot for restart_lsn and
 *   mapping files (mappings.c). rename requires both.
 * - rename: PostgreSQL has no rename, and a folder that is renamed by hand has a crash between the folder's name
 *   and the name inside its state file, from which the server loads a slot that it can neither save nor drop. So a
 *   slot of the new name is created, complete and durable, and then the old one is dropped, which is what the server
 *   does by itself and recovers from. The old one is owned throughout: what the new one needs is reserved by
 *   one of them at every moment. After a crash there is the old one, or both, or the new one, each whole.
 *
 * A function that fails releases what it took, also when an exception handler swallows the error: the server does
 * that only at the end of a whole command, and until then a slot would count as in use.
 */
#include "tuskline.h"

#include "funcapi.h"
#include "storage/fd.h"
#include "storage/lwlock.h"
#include "storage/procarray.h"
#include "utils/builtins.h"
#include "utils/pg_lsn.h"

PG_FUNCTION_INFO_V1(tuskline_reserve);
PG_FUNCTION_INFO_V1(tuskline_set_fields);
PG_FUNCTION_INFO_V1(tuskline_set_failover);
PG_FUNCTION_INFO_V1(tuskline_rename);
PG_FUNCTION_INFO_V1(tuskline_drop);

/* Release the slot that an error left acquired. A transaction abort would do so, too, but an exception handler does not. */
void
let_go(void)
{
	LWLockReleaseAll();
	if (MyReplicationSlot != NULL)
		ReplicationSlotRelease();
}

/* Refuse positions that are out of order, or that this standby has not applied. */
void
require_order(XLogRecPtr restart_lsn, XLogRecPtr confirmed_flush)
{
	TimeLineID	timeline;
	XLogRecPtr	end = wal_end(&timeline);

	if (restart_lsn > confirmed_flush)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("restart_lsn must not be after confirmed_flush_lsn"),
				 errdetail("The values are " LSN_TEXT " and " LSN_TEXT ".", LSN_PARTS(restart_lsn), LSN_PARTS(confirmed_flush)),
				 errhint("Read both values of the primary's slot in one query.")));
	if (confirmed_flush > end)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("standby has not replayed WAL up to confirmed_flush_lsn " LSN_TEXT, LSN_PARTS(confirmed_flush)),
				 errdetail("The standby has replayed WAL up to " LSN_TEXT ".", LSN_PARTS(end)),
				 errhint("Retry when the standby has replayed WAL up to that position.")));
}

void
require_wal(XLogRecPtr restart_lsn)
{
	if (!wal_present(restart_lsn))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("standby lacks WAL from restart_lsn " LSN_TEXT " on", LSN_PARTS(restart_lsn)),
				 errdetail("The WAL was removed, or has not been received."),
				 errhint("Wait until the slot on the primary has advanced, or increase wal_keep_size on this standby.")));
}

static void
require_snapshot(XLogRecPtr restart_lsn)
{
	if (!snapshot_present(restart_lsn))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("no snapshot for restart_lsn " LSN_TEXT " on this standby", LSN_PARTS(restart_lsn)),
				 errdetail("Decoding from that position would silently omit transactions."),
				 errhint("Call advance() for the slot until it has written a snapshot.")));
	if (!snapshot_complete(restart_lsn))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("snapshot for restart_lsn " LSN_TEXT " was written by another decoder", LSN_PARTS(restart_lsn)),
				 errdetail("The snapshot may lack catalog changes."),
				 errhint("Call advance() for the slot until it has written a snapshot.")));
}

static void
require_mappings(const char *name)
{
	if (!mappings_complete(name))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("mapping files that replication slot \"%s\" needs may be missing on this standby", name),
				 errdetail("A restartpoint removes mapping files that no slot needs. Transactions would be decoded without their own"
						   " catalog changes."),
				 errhint("Call restore_mappings() for the slot.")));
}

static void
require_temporary(const char *name)
{
	if (!has_temporary_name(name))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_NAME),
				 errmsg("\"%s\" is not a temporary name", name),
				 errdetail("A copy has a temporary name until it is proven, so that no client uses it."),
				 errhint("Specify a name that begins with \"%s\".", TEMPORARY_PREFIX)));
}

/* Acquire the slot if it may be changed. This is checked first, so that no other slot is ever touched. */
void
take_slot(const char *name)
{
	ReplicationSlot slot;

	if (!find_slot(name, &slot))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("replication slot \"%s\" does not exist", name),
				 errhint("Create the slot with reserve().")));
	require_usable(&slot);
	if (slot.active_pid != 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_IN_USE),
				 errmsg("replication slot \"%s\" is in use by process %d", name, (int) slot.active_pid),
				 errhint("Retry when the slot is no longer in use.")));
	compat_acquire(name);
	require_usable(MyReplicationSlot);
}

/*
 * Choose the oldest transaction whose catalog rows are still safe here, and hold it.
 *
 * While both locks are held no process moves the horizon. ReplicationSlotsComputeRequiredXmin(true) is not used: newer
 * minor releases require it to be called with ReplicationSlotControlLock held, older ones take that lock inside and would
 * wait for themselves. Without it an older release can overwrite the horizon with one that it computed before, so
 * it is read again until it covers this slot.
 */
static TransactionId
reserve_xmin(void)
{
	ReplicationSlot *slot = MyReplicationSlot;
	TransactionId chosen;
	TransactionId data_horizon;
	TransactionId horizon;

	LWLockAcquire(ReplicationSlotControlLock, LW_EXCLUSIVE);
	LWLockAcquire(ProcArrayLock, LW_EXCLUSIVE);
	chosen = GetOldestSafeDecodingTransactionId(true);
	SpinLockAcquire(&slot->mutex);
	slot->data.catalog_xmin = chosen;
	slot->effective_catalog_xmin = chosen;
	SpinLockRelease(&slot->mutex);
	LWLockRelease(ProcArrayLock);
	LWLockRelease(ReplicationSlotControlLock);
	do
	{
		ReplicationSlotsComputeRequiredXmin(false);
		ProcArrayGetReplicationSlotXmin(&data_horizon, &horizon);
	} while (!TransactionIdIsValid(horizon) || TransactionIdPrecedes(chosen, horizon));
	return chosen;
}

/*
 * reserve(slot_name, plugin, restart_lsn, confirmed_flush_lsn, two_phase, two_phase_at) -> catalog_xmin
 *
 * The positions are those of the slot on the primary; the catalog_xmin is this server's own, since VACUUM here
 * may already be allowed to pass the primary's.
 */
Datum
tuskline_reserve(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo, 0, "slot_name");
	char	   *plugin = name_argument(fcinfo, 1, "plugin");
	XLogRecPtr	restart_lsn = lsn_argument(fcinfo, 2, "restart_lsn");
	XLogRecPtr	confirmed_flush = lsn_argument(fcinfo, 3, "confirmed_flush_lsn");
	bool		two_phase = bool_argument(fcinfo, 4, "two_phase");
	XLogRecPtr	two_phase_at = PG_ARGISNULL(5) ? InvalidXLogRecPtr : PG_GETARG_LSN(5);
	volatile TransactionId chosen = InvalidTransactionId;
	ReplicationSlot found;

	require_standby();
	require_no_slot_in_hand();
	require_logical_wal();
	ReplicationSlotValidateName(name, ERROR);
	require_temporary(name);
	if (two_phase && !HAS_TWO_PHASE)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("two_phase is not supported before PostgreSQL 14"),
				 errhint("Set two_phase to false.")));
	/* ALTER_REPLICATION_SLOT (18) leaves it at 0/0: every prepared transaction is sent at its PREPARE. NULL is unknown. */
	if (two_phase ? PG_ARGISNULL(5) : !XLogRecPtrIsInvalid(two_phase_at))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("two_phase and two_phase_at must be specified together"),
				 errdetail("A transaction that was prepared before two_phase_at is sent as a whole when it commits."),
				 errhint("Read both values on the primary with inspect().")));
	require_order(restart_lsn, confirmed_flush);
	if (two_phase_at > confirmed_flush)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("two_phase_at must not be after confirmed_flush_lsn"),
				 errhint("Read both values on the primary with inspect().")));
	if (find_slot(name, &found))
		ereport(ERROR,
				(errcode(ERRCODE_DUPLICATE_OBJECT),
				 errmsg("replication slot \"%s\" already exists", name),
				 errhint("Drop the slot with drop(), or continue with it.")));
	require_plugin(plugin);
	PG_TRY();
	{
		ReplicationSlot *slot;

		compat_create(name, two_phase);
		FAIL_POINT("reserve.created");
		slot = MyReplicationSlot;
		SpinLockAcquire(&slot->mutex);
		namestrcpy(&slot->data.plugin, plugin);
		slot->data.restart_lsn = restart_lsn;
		slot->data.confirmed_flush = confirmed_flush;
		compat_set_two_phase_at(&slot->data, two_phase_at);
		SpinLockRelease(&slot->mutex);
		ReplicationSlotsComputeRequiredLSN();
		require_wal(restart_lsn);
		chosen = reserve_xmin();
		FAIL_POINT("reserve.reserved");
		write_marker(name, name);
		ReplicationSlotPersist();
		FAIL_POINT("reserve.persisted");
		/* Some releases compute a persistent slot's WAL from the state on disk, which is written only now. */
		ReplicationSlotsComputeRequiredLSN();
		ReplicationSlotRelease();
	}
	PG_CATCH();
	{
		let_go();
		PG_RE_THROW();
	}
	PG_END_TRY();
	PG_RETURN_DATUM(TransactionIdGetDatum(chosen));
}

static void
require_forward(const ReplicationSlot *slot, XLogRecPtr restart_lsn, XLogRecPtr confirmed_flush, TransactionId catalog_xmin)
{
	const char *field = NULL;

	if (restart_lsn < slot->data.restart_lsn)
		field = "restart_lsn";
	else if (confirmed_flush < slot->data.confirmed_flush)
		field = "confirmed_flush_lsn";
	else if (TransactionIdIsValid(slot->data.catalog_xmin) &&
			 TransactionIdPrecedes(catalog_xmin, slot->data.catalog_xmin))
		field = "catalog_xmin";
	if (field != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s of replication slot \"%s\" would move backwards", field, NameStr(slot->data.name)),
				 errdetail("The slot has restart_lsn " LSN_TEXT ", confirmed_flush_lsn " LSN_TEXT " and catalog_xmin %u;"
						   " older WAL and rows may have been removed.",
						   LSN_PARTS(slot->data.restart_lsn), LSN_PARTS(slot->data.confirmed_flush),
						   slot->data.catalog_xmin),
				 errhint("Specify may_go_back => true if it is certain that nothing was removed in between.")));
}

/* The three fields, together. Positions recorded for a later move belong to the old ones. */
static void
write_fields(ReplicationSlot *slot, XLogRecPtr restart_lsn, XLogRecPtr confirmed_flush, TransactionId catalog_xmin)
{
	SpinLockAcquire(&slot->mutex);
	slot->data.restart_lsn = restart_lsn;
	slot->data.confirmed_flush = confirmed_flush;
	slot->data.catalog_xmin = catalog_xmin;
	slot->candidate_catalog_xmin = InvalidTransactionId;
	slot->candidate_xmin_lsn = InvalidXLogRecPtr;
	slot->candidate_restart_valid = InvalidXLogRecPtr;
	slot->candidate_restart_lsn = InvalidXLogRecPtr;
	SpinLockRelease(&slot->mutex);
}

/* set_fields(slot_name, restart_lsn, confirmed_flush_lsn, catalog_xmin, may_go_back) */
Datum
tuskline_set_fields(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo, 0, "slot_name");
	XLogRecPtr	restart_lsn = lsn_argument(fcinfo, 1, "restart_lsn");
	XLogRecPtr	confirmed_flush = lsn_argument(fcinfo, 2, "confirmed_flush_lsn");
	TransactionId catalog_xmin = PG_ARGISNULL(3) ? InvalidTransactionId : DatumGetTransactionId(PG_GETARG_DATUM(3));
	bool		may_go_back = bool_argument(fcinfo, 4, "may_go_back");
	ReplicationSlot *before = palloc(sizeof(ReplicationSlot));
	volatile bool written = false;

	require_standby();
	require_no_slot_in_hand();
	if (!TransactionIdIsNormal(catalog_xmin) || TransactionIdPrecedes(compat_next_xid(), catalog_xmin))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("catalog_xmin is null, or a transaction that this standby does not know"),
				 errhint("Wait until the standby has caught up, then specify the value of the slot on the primary.")));
	require_order(restart_lsn, confirmed_flush);
	PG_TRY();
	{
		ReplicationSlot *slot;

		take_slot(name);
		slot = MyReplicationSlot;
		*before = *slot;
		if (!may_go_back)
			require_forward(slot, restart_lsn, confirmed_flush, catalog_xmin);
		require_snapshot(restart_lsn);
		require_wal(restart_lsn);
		if (restart_lsn < slot->data.restart_lsn)
			forget_mappings(name);
		written = true;
		write_fields(slot, restart_lsn, confirmed_flush, catalog_xmin);
		ReplicationSlotMarkDirty();
		FAIL_POINT("set_fields.written");
		ReplicationSlotSave();
		FAIL_POINT("set_fields.saved");
		SpinLockAcquire(&slot->mutex);
		slot->effective_catalog_xmin = catalog_xmin;
		SpinLockRelease(&slot->mutex);
		ReplicationSlotsComputeRequiredXmin(false);
		ReplicationSlotsComputeRequiredLSN();
		/* A position that went back was not held before: whether its WAL still exists is known only now. */
		require_snapshot(restart_lsn);
		require_wal(restart_lsn);
		ReplicationSlotRelease();
	}
	PG_CATCH();
	{
		if (written && MyReplicationSlot != NULL)
		{
			write_fields(MyReplicationSlot, before->data.restart_lsn, before->data.confirmed_flush, before->data.catalog_xmin);
			SpinLockAcquire(&MyReplicationSlot->mutex);
			MyReplicationSlot->effective_catalog_xmin = before->effective_catalog_xmin;
			SpinLockRelease(&MyReplicationSlot->mutex);
			ReplicationSlotMarkDirty();
		}
		let_go();
		PG_RE_THROW();
	}
	PG_END_TRY();
	PG_RETURN_VOID();
}

/*
 * set_failover(slot_name, failover)
 *
 * The server refuses to create a slot with failover in recovery, since it synchronizes none from there. Nothing reads
 * the flag before a promotion; then the slot is as it was on the primary.
 */
Datum
tuskline_set_failover(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo, 0, "slot_name");
	bool		failover = bool_argument(fcinfo, 1, "failover");

	require_standby();
	require_no_slot_in_hand();
	if (failover && !HAS_FAILOVER)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("failover is not supported before PostgreSQL 17"),
				 errhint("Set failover to false.")));
	PG_TRY();
	{
		take_slot(name);
		SpinLockAcquire(&MyReplicationSlot->mutex);
		compat_set_failover(&MyReplicationSlot->data, failover);
		SpinLockRelease(&MyReplicationSlot->mutex);
		ReplicationSlotMarkDirty();
		ReplicationSlotSave();
		ReplicationSlotRelease();
	}
	PG_CATCH();
	{
		let_go();
		PG_RE_THROW();
	}
	PG_END_TRY();
	PG_RETURN_VOID();
}

/* Create a slot of the new name equal to `old`; complete and durable on return, and no longer owned. */
static void
make_renamed(const char *new_name, const ReplicationSlot *old)
{
	ReplicationSlot *slot;
	char		marker[MARKER_LENGTH + 1];

	compat_create(new_name, compat_two_phase(&old->data));
	FAIL_POINT("rename.created");
	slot = MyReplicationSlot;
	SpinLockAcquire(&slot->mutex);
	slot->data.plugin = old->data.plugin;
	slot->data.restart_lsn = old->data.restart_lsn;
	slot->data.confirmed_flush = old->data.confirmed_flush;
	slot->data.catalog_xmin = old->data.catalog_xmin;
	slot->effective_catalog_xmin = old->effective_catalog_xmin;
	compat_set_two_phase_at(&slot->data, compat_two_phase_at(&old->data));
	compat_set_failover(&slot->data, compat_failover(&old->data));
	SpinLockRelease(&slot->mutex);
	ReplicationSlotsComputeRequiredXmin(false);
	ReplicationSlotsComputeRequiredLSN();
	if (read_marker(NameStr(old->data.name), marker) == MARKER_READ)
		write_marker(new_name, marker);
	note_mappings(new_name);
	FAIL_POINT("rename.copied");
	ReplicationSlotPersist();
	FAIL_POINT("rename.persisted");
	ReplicationSlotsComputeRequiredLSN();
	ReplicationSlotRelease();
}

/* Drop a slot. An error leaves none acquired. */
static void
drop_slot(const char *name)
{
	PG_TRY();
	{
		ReplicationSlotDrop(name, true);
	}
	PG_CATCH();
	{
		let_go();
		PG_RE_THROW();
	}
	PG_END_TRY();
}

/*
 * rename(slot_name, new_name): a proven copy gets the name that clients use.
 *
 * A process can own one slot, so the old one is released from it, still marked in use, while the new one is created; no
 * interrupt is served meanwhile, since a process that ended then would leave it in use forever.
 */
Datum
tuskline_rename(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo, 0, "slot_name");
	char	   *new_name = name_argument(fcinfo, 1, "new_name");
	ReplicationSlot found;
	ReplicationSlot *volatile aside = NULL;

	require_standby();
	require_no_slot_in_hand();
	require_logical_wal();
	ReplicationSlotValidateName(new_name, ERROR);
	require_temporary(name);
	if (has_temporary_name(new_name))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_NAME),
				 errmsg("\"%s\" is a temporary name", new_name),
				 errhint("Specify the name of the slot on the primary.")));
	if (find_slot(new_name, &found))
		ereport(ERROR,
				(errcode(ERRCODE_DUPLICATE_OBJECT),
				 errmsg("replication slot \"%s\" already exists", new_name),
				 errdetail("The existing slot was not changed."),
				 errhint("Drop the existing slot if it is a copy that is no longer needed.")));
	PG_TRY();
	{
		ReplicationSlot *old;

		take_slot(name);
		old = MyReplicationSlot;
		require_snapshot(old->data.restart_lsn);
		require_wal(old->data.restart_lsn);
		require_mappings(name);
		HOLD_INTERRUPTS();
		aside = old;
		MyReplicationSlot = NULL;
		make_renamed(new_name, old);
		MyReplicationSlot = old;
		aside = NULL;
		RESUME_INTERRUPTS();
		ReplicationSlotRelease();
	}
	PG_CATCH();
	{
		let_go();
		MyReplicationSlot = aside;
		let_go();
		PG_RE_THROW();
	}
	PG_END_TRY();
	/* Between the two lines another process can acquire the old slot; the new one is complete nevertheless. */
	drop_slot(name);
	FAIL_POINT("rename.dropped");
	PG_RETURN_VOID();
}

static void
require_made_here(const char *name)
{
	char		marker[MARKER_LENGTH + 1];

	if (read_marker(name, marker) != MARKER_READ)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("replication slot \"%s\" was not created by reserve()", name),
				 errdetail("The slot has no incarnation id, so another client may need it."),
				 errhint("Specify any_slot => true, or use pg_drop_replication_slot().")));
}

/* drop(slot_name, any_slot): a copy on a standby; after a promotion only what was never proven. */
Datum
tuskline_drop(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo, 0, "slot_name");
	bool		any_slot = bool_argument(fcinfo, 1, "any_slot");
	ReplicationSlot slot;

	require_no_slot_in_hand();
	if (!RecoveryInProgress() && !has_temporary_name(name))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot drop replication slot \"%s\" on a primary", name),
				 errdetail("On a primary, only slots with a temporary name can be dropped."),
				 errhint("Use pg_drop_replication_slot().")));
	if (!find_slot(name, &slot))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("replication slot \"%s\" does not exist", name),
				 errhint("The slot may have been dropped already.")));
	require_ours(&slot);
	if (!any_slot)
		require_made_here(name);
	drop_slot(name);
	PG_RETURN_VOID();
}
