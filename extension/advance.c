/*
 * Advances a copy by decoding WAL fully, without sending anything.
 *
 * The server's own pg_replication_slot_advance leaves out records from which its decoder would learn which
 * transactions changed the catalog (see snapshots.c), and before the minor releases of May 2025 those that hold back
 * catalog_xmin. The decoder here is given every record, as one that serves a client is, with two differences that do
 * not affect either:
 *
 * - It has no plugin, whatever the slot's plugin is: it is created like the decoder of the fast-forward advance,
 *   which loads no plugin and needs no options, and is then switched out of fast-forward mode. An origin filter
 *   rejects everything, so row changes are not kept and transactions are forgotten when they commit: nothing is
 *   looked up in the catalog, and the only memory used is that for changes of the catalog.
 * - Of the snapshots on disk it starts only from those that we wrote. Where another decoder has left one, it is given
 *   the running transactions as of a position one byte earlier, under which no file can exist. It then becomes
 *   consistent by itself, later, or not before long transactions have ended.
 *
 * A decoder that starts from a snapshot has not read what the transactions in progress there had done before. The server
 * relies on snapshots up to confirmed_flush_lsn being on disk already; here they need not be, since another copy wrote the
 * one that it starts from. So those that the snapshot names as having changed the catalog are made known to it (16+).
 * Before 16 snapshots do not name them, and the server's decoder records only those whose commit has invalidations, which
 * changes of user_catalog_table tables do not cause. So all transactions in progress there count as having changed the
 * catalog: an additional one in a snapshot is harmless. If the record does not list all of them, no decoder starts.
 *
 * So by induction every snapshot that it writes is complete: it begins with none or with a complete one, and misses
 * nothing.
 */
#include "tuskline.h"

#include "access/xlogreader.h"
#include "replication/decode.h"
#include "replication/reorderbuffer.h"
#include "replication/snapbuild.h"
#include "storage/standbydefs.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/pg_lsn.h"
#include "utils/resowner.h"

PG_FUNCTION_INFO_V1(tuskline_advance);

static bool
refuse_all(LogicalDecodingContext *ctx, RepOriginId origin)
{
	return true;
}

/* A decoder needs these callbacks, although they are never called, since the filter rejects everything. */
static void
begin_nothing(LogicalDecodingContext *ctx, ReorderBufferTXN *txn)
{
}

static void
change_nothing(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, Relation relation, ReorderBufferChange *change)
{
}

static void
commit_nothing(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr commit_lsn)
{
}

static LogicalDecodingContext *
make_decoder(void)
{
	LogicalDecodingContext *ctx = compat_decoder();

	ctx->fast_forward = false;
	ctx->callbacks.begin_cb = begin_nothing;
	ctx->callbacks.change_cb = change_nothing;
	ctx->callbacks.commit_cb = commit_nothing;
	ctx->callbacks.filter_by_origin_cb = refuse_all;
	return ctx;
}

/* Whether the record at which the decoder could start from a snapshot, or the snapshot itself, names what is in progress. */
static bool
knows_what_runs(LogicalDecodingContext *ctx, bool is_running)
{
#if PG_VERSION_NUM >= 160000
	return true;
#else
	return is_running && !((xl_running_xacts *) XLogRecGetData(ctx->reader))->subxid_overflow;
#endif
}

/* Make known to a decoder that was just started from the snapshot at `lsn` what may have changed the catalog before. */
static void
recall_changes(LogicalDecodingContext *ctx, XLogRecPtr lsn)
{
#if PG_VERSION_NUM >= 160000
	recall_changes_in_progress(ctx->reorder, lsn);
#else
	xl_running_xacts *running = (xl_running_xacts *) XLogRecGetData(ctx->reader);

	for (int i = 0; i < running->xcnt + running->subxcnt; i++)
		ReorderBufferXidSetCatalogChanges(ctx->reorder, running->xids[i], lsn);
#endif
}

/* Give the decoder a record at which snapshots are read and written; those of other decoders are overwritten unread. */
static void
feed_snapshot_point(LogicalDecodingContext *ctx, bool is_running)
{
	SnapBuild  *builder = ctx->snapshot_builder;
	XLogRecPtr	lsn = ctx->reader->ReadRecPtr;
	bool		restored = false;

	if (SnapBuildCurrentState(builder) == SNAPBUILD_CONSISTENT)
		write_snapshot(builder, lsn);
	else if (knows_what_runs(ctx, is_running) && snapshot_complete(lsn))
		restored = true;
	else
	{
		/* Of a checkpoint's record only the file would be used. */
		if (is_running)
		{
			xl_running_xacts *running = (xl_running_xacts *) XLogRecGetData(ctx->reader);

			SnapBuildProcessRunningXacts(builder, lsn - 1, running);
			ReorderBufferAbortOld(ctx->reorder, running->oldestRunningXid);
		}
		return;
	}
	LogicalDecodingProcessRecord(ctx, ctx->reader);
	if (restored && SnapBuildCurrentState(builder) == SNAPBUILD_CONSISTENT)
		recall_changes(ctx, lsn);
}

static void
feed(LogicalDecodingContext *ctx)
{
	RmgrId		manager = XLogRecGetRmid(ctx->reader);
	uint8		kind = XLogRecGetInfo(ctx->reader) & ~XLR_INFO_MASK;

	if (manager == RM_STANDBY_ID && kind == XLOG_RUNNING_XACTS)
		feed_snapshot_point(ctx, true);
	else if (manager == RM_XLOG_ID && (kind == XLOG_CHECKPOINT_SHUTDOWN || kind == XLOG_END_OF_RECOVERY))
		feed_snapshot_point(ctx, false);
	else
		LogicalDecodingProcessRecord(ctx, ctx->reader);
}

static void
feed_to(LogicalDecodingContext *ctx, XLogRecPtr upto)
{
	ResourceOwner owner = CurrentResourceOwner;
	MemoryContext context = CurrentMemoryContext;
	XLogRecPtr	from = MyReplicationSlot->data.restart_lsn;

	while (!XLogRecPtrIsInvalid(from) ? from < upto : ctx->reader->EndRecPtr < upto)
	{
		read_next_record(ctx->reader, from);
		from = InvalidXLogRecPtr;
		feed(ctx);
		/* Invalidations are carried out in subtransactions, which leave their parents' of both. */
		CurrentResourceOwner = owner;
		MemoryContextSwitchTo(context);
		CHECK_FOR_INTERRUPTS();
	}
}

/* Decode from the owned slot's restart_lsn to `upto`, and confirm that. */
static void
decode_to(XLogRecPtr upto)
{
	LogicalDecodingContext *ctx = make_decoder();

	InvalidateSystemCaches();
	PG_TRY();
	{
		feed_to(ctx, upto);
	}
	PG_CATCH();
	{
		compat_close_segment(ctx->reader);
		PG_RE_THROW();
	}
	PG_END_TRY();
	FAIL_POINT("advance.decoded");
	LogicalConfirmReceivedLocation(upto);
	ReplicationSlotMarkDirty();
	ReplicationSlotSave();
	FreeDecodingContext(ctx);
	InvalidateSystemCaches();
	ReplicationSlotsComputeRequiredXmin(false);
	ReplicationSlotsComputeRequiredLSN();
}

/* advance(slot_name, upto_lsn) -> confirmed_flush_lsn: all of the WAL from restart_lsn up to there is decoded. */
Datum
tuskline_advance(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo, 0, "slot_name");
	XLogRecPtr	upto = lsn_argument(fcinfo, 1, "upto_lsn");
	volatile XLogRecPtr reached = InvalidXLogRecPtr;

	require_standby();
	require_no_slot_in_hand();
	require_logical_wal();
	PG_TRY();
	{
		take_slot(name);
		require_order(MyReplicationSlot->data.confirmed_flush, upto);
		require_wal(MyReplicationSlot->data.restart_lsn);
		decode_to(upto);
		reached = MyReplicationSlot->data.confirmed_flush;
		ReplicationSlotRelease();
	}
	PG_CATCH();
	{
		let_go();
		/* The catalog lookups of a decoder belong to another time. */
		InvalidateSystemCaches();
		PG_RE_THROW();
	}
	PG_END_TRY();
	PG_RETURN_LSN(reached);
}
