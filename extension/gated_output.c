/*
 * The output plugin "tuskline": pgoutput, whose transactions end only when every failover candidate has them.
 *
 * A client that holds a transaction which the promoted standby lacks differs from it forever. So each callback that
 * finishes something at the client (a commit, a prepare, its commit or rollback, a message outside of transactions)
 * waits until the standbys that stream from the physical slots named in tuskline.wait_for_slots have flushed WAL up
 * to the END of the record that finishes it: with the start alone a standby may lack the record. Then pgoutput's own
 * callback runs; what is sent is pgoutput's, byte for byte. A transaction is decoded when its end is known, so its
 * begin waits as well, and nothing of it is sent before; the end checks again, as the setting may have changed by then. One
 * that is streamed while in progress is sent at once, and its end waits.
 *
 * A walsender accepts any position that a standby reports, and stores it in the slot. An old primary that comes back
 * without pg_rewind reports WAL of its old timeline. So a slot's restart_lsn alone proves nothing: what counts is the
 * flush position of the walsender that has the slot, while it streams, and only if it has sent that much.
 *
 * In doubt it waits: for a slot that is missing, logical, lost or not in use, and for a setting that is no list,
 * until the slots or the setting are repaired; the log names which. Only an empty setting lets everything pass. Any user
 * may set it, since it protects the client that reads: if only superusers could, a value that another user set would be
 * dropped when the library is loaded, along with the server's own value, and nothing would wait.
 *
 * No lock is held while waiting. The wait also ends for a cancel or the end of the process, a client that has
 * disconnected, a changed configuration, and a server that stops. The last has to be polled: the checkpointer asks
 * walsenders to stop by a flag that only they can read, and waits for them indefinitely; any process can read it in
 * postmaster.pid.
 */
#include "tuskline.h"

#include "pgstat.h"
#include "replication/output_plugin.h"
#include "replication/reorderbuffer.h"
#include "replication/syncrep.h"
#include "replication/walsender.h"
#include "replication/walsender_private.h"
#include "storage/fd.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/pidfile.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

/* Sleep between two polls of the slots, in ms: the first one, and the limit of its doubling. */
#define SHORTEST_SLEEP 50
#define LONGEST_SLEEP 200

/* Time until a waiting transaction is first logged, with the reason, and between two such messages, in ms. */
#define FIRST_REPORT 1000
#define NEXT_REPORT 30000

/* How often the postmaster's file is read, and how long a standby that streams may take in a server that stops. */
#define LOOK_FOR_STOP 500
#define STOPPING_GRACE 2000

extern PGDLLEXPORT void _PG_init(void);
extern PGDLLEXPORT void _PG_output_plugin_init(OutputPluginCallbacks *callbacks);

static char *wait_for_slots = NULL;
static OutputPluginCallbacks pgoutput;

/* What holds a transaction back. */
typedef struct Obstacle
{
	char		name[NAMEDATALEN];
	const char *reason;
	const char *hint;
	bool		streams;		/* progress can be expected: a standby is connected and only lags */
} Obstacle;

/* What a walsender has sent, and what its client has confirmed. */
typedef struct Sender
{
	WalSndState state;
	XLogRecPtr	sent;
	XLogRecPtr	flush;
	XLogRecPtr	apply;
} Sender;

/* The walsender with this process id, if it is one. */
static bool
find_sender(pid_t pid, Sender *found)
{
	for (int i = 0; i < max_wal_senders; i++)
	{
		WalSnd	   *sender = &WalSndCtl->walsnds[i];
		bool		is_it;

		SpinLockAcquire(&sender->mutex);
		is_it = sender->pid == pid;
		found->state = sender->state;
		found->sent = sender->sentPtr;
		found->flush = sender->flush;
		found->apply = sender->apply;
		SpinLockRelease(&sender->mutex);
		if (is_it)
			return true;
	}
	return false;
}

/* Whether the standby that streams from an active slot has flushed WAL up to `end`; if not, why. */
static bool
sender_has(const ReplicationSlot *slot, XLogRecPtr end, Obstacle *obstacle)
{
	Sender		sender;

	if (!find_sender(slot->active_pid, &sender) || XLogRecPtrIsInvalid(sender.flush))
	{
		obstacle->reason = "The slot's standby has not reported a flush position yet.";
		obstacle->hint = "Check the progress of the standby in pg_stat_replication.";
		obstacle->streams = true;
	}
	else if (XLogRecPtrIsInvalid(sender.apply))
	{
		obstacle->reason = "The slot is used by a client that does not replay WAL.";
		obstacle->hint = "Use other slots for pg_receivewal and pg_basebackup.";
	}
	else if (sender.flush > sender.sent)
	{
		obstacle->reason = "The slot's standby reports WAL as flushed that was not sent to it.";
		obstacle->hint = "If this persists, the standby is on another timeline. Run pg_rewind on it, or rebuild it.";
	}
	else if (sender.state != WALSNDSTATE_STREAMING && sender.state != WALSNDSTATE_STOPPING)
	{
		obstacle->reason = "The slot's standby is still catching up.";
		obstacle->hint = "Check the progress of the standby in pg_stat_replication.";
		obstacle->streams = true;
	}
	else if (Min(sender.flush, slot->data.restart_lsn) < end)
	{
		obstacle->reason = "The slot's standby has not flushed the transaction's WAL yet.";
		obstacle->hint = "Check the progress of the standby in pg_stat_replication.";
		obstacle->streams = true;
	}
	else
		return true;
	return false;
}

/* Whether the slot's standby has flushed WAL up to `end`; if not, why. */
static bool
has_flushed(const char *name, XLogRecPtr end, Obstacle *obstacle)
{
	ReplicationSlot slot;

	snprintf(obstacle->name, sizeof(obstacle->name), "%s", name);
	obstacle->streams = false;
	if (!find_slot(name, &slot))
	{
		obstacle->reason = "The slot does not exist.";
		obstacle->hint = "Create the slot with pg_create_physical_replication_slot(), or remove it from tuskline.wait_for_slots.";
	}
	else if (!SlotIsPhysical(&slot))
	{
		obstacle->reason = "The slot is a logical slot.";
		obstacle->hint = "Set tuskline.wait_for_slots to the physical slots of the failover candidates.";
	}
	else if (compat_invalidation(&slot.data) != NULL)
	{
		obstacle->reason = "The slot is lost: WAL that its standby needs was removed.";
		obstacle->hint = "Rebuild the standby and recreate the slot, or remove the slot from tuskline.wait_for_slots.";
	}
	else if (slot.active_pid == 0)
	{
		obstacle->reason = "No standby streams from the slot.";
		obstacle->hint = "Start the standby whose primary_slot_name is this slot, or remove the slot from tuskline.wait_for_slots.";
	}
	else
		return sender_has(&slot, end, obstacle);
	return false;
}

/* Whether all slots of the setting have flushed up to `end`; if not, the first that has not. */
static bool
may_pass(XLogRecPtr end, Obstacle *obstacle)
{
	char	   *text;
	List	   *names;
	ListCell   *cell;
	bool		passes = true;

	if (wait_for_slots == NULL || wait_for_slots[0] == '\0')
		return true;
	text = pstrdup(wait_for_slots);
	if (!SplitIdentifierString(text, ',', &names))
	{
		snprintf(obstacle->name, sizeof(obstacle->name), "?");
		obstacle->reason = "The value of tuskline.wait_for_slots is not a list of names.";
		obstacle->hint = "Specify slot names separated by commas.";
		obstacle->streams = false;
		passes = false;
	}
	else
	{
		foreach(cell, names)
		{
			if (!has_flushed((const char *) lfirst(cell), end, obstacle))
			{
				passes = false;
				break;
			}
		}
		list_free(names);
	}
	pfree(text);
	return passes;
}

/* Whether a smart or fast shutdown was requested. */
static bool
server_stops(void)
{
	char		line[MAXPGPATH];
	bool		stops = false;
	FILE	   *file = AllocateFile("postmaster.pid", "r");

	if (file == NULL)
		return false;
	for (int number = 1; number <= LOCK_FILE_LINE_PM_STATUS && fgets(line, sizeof(line), file) != NULL; number++)
		stops = number == LOCK_FILE_LINE_PM_STATUS &&
			strncmp(line, PM_STATUS_STOPPING, strlen(PM_STATUS_STOPPING)) == 0;
	FreeFile(file);
	return stops;
}

/* A walsender's settings; a session that reads by SQL reloads them between its statements, as any other. */
static void
take_up_settings(void)
{
	if (!am_walsender || !ConfigReloadPending)
		return;
	ConfigReloadPending = false;
	ProcessConfigFile(PGC_SIGHUP);
	SyncRepInitConfig();
}

/* End this process if there is nothing left to wait for. */
static void
end_if_pointless(const Obstacle *obstacle, TimestampTz now, TimestampTz *looked, TimestampTz *stopping_since)
{
	if (compat_client_has_gone())
		ereport(FATAL,
				(errcode(ERRCODE_CONNECTION_FAILURE),
				 errmsg("connection to client lost")));
	if (!TimestampDifferenceExceeds(*looked, now, LOOK_FOR_STOP))
		return;
	*looked = now;
	if (*stopping_since == 0 && server_stops())
		*stopping_since = now;
	if (*stopping_since != 0 &&
		(!obstacle->streams || TimestampDifferenceExceeds(*stopping_since, now, STOPPING_GRACE)))
		ereport(FATAL,
				(errcode(ERRCODE_ADMIN_SHUTDOWN),
				 errmsg("server is shutting down while a transaction waits for replication slot \"%s\"", obstacle->name),
				 errdetail("%s", obstacle->reason),
				 errhint("The transaction has not been sent; it will be sent after the server has been restarted.")));
}

/* Return when every failover candidate has WAL up to `end`. */
static void
wait_for_candidates(LogicalDecodingContext *ctx, XLogRecPtr end)
{
	TimestampTz start = GetCurrentTimestamp();
	TimestampTz reported = 0;
	TimestampTz looked = start;
	TimestampTz stopping_since = 0;
	long		sleep = SHORTEST_SLEEP;
	Obstacle	obstacle;

	take_up_settings();
	while (!may_pass(end, &obstacle))
	{
		TimestampTz now = GetCurrentTimestamp();

		if (reported == 0 ? TimestampDifferenceExceeds(start, now, FIRST_REPORT)
			: TimestampDifferenceExceeds(reported, now, NEXT_REPORT))
		{
			ereport(LOG,
					(errmsg("transaction that ends at " LSN_TEXT " is waiting for replication slot \"%s\"",
							LSN_PARTS(end), obstacle.name),
					 errdetail("%s", obstacle.reason),
					 errhint("%s", obstacle.hint)));
			reported = now;
		}
		end_if_pointless(&obstacle, now, &looked, &stopping_since);
		compat_keep_alive(ctx);
		if (WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_POSTMASTER_DEATH, sleep, PG_WAIT_EXTENSION) &
			WL_POSTMASTER_DEATH)
			proc_exit(1);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		take_up_settings();
		sleep = Min(sleep * 2, LONGEST_SLEEP);
	}
	if (reported != 0)
		ereport(LOG, (errmsg("transaction that ends at " LSN_TEXT " is no longer waiting", LSN_PARTS(end))));
}

static void
begin(LogicalDecodingContext *ctx, ReorderBufferTXN *txn)
{
	wait_for_candidates(ctx, txn->end_lsn);
	pgoutput.begin_cb(ctx, txn);
}

static void
commit(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr commit_lsn)
{
	wait_for_candidates(ctx, txn->end_lsn);
	pgoutput.commit_cb(ctx, txn, commit_lsn);
}

/* A message within a transaction is not decoded before its commit. One outside is decoded as soon as it is read. */
static void
message(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr message_lsn, bool transactional,
		const char *prefix, Size size, const char *content)
{
	if (!transactional)
		wait_for_candidates(ctx, ctx->reader->EndRecPtr);
	pgoutput.message_cb(ctx, txn, message_lsn, transactional, prefix, size, content);
}

#if HAS_TWO_PHASE
static void
begin_prepare(LogicalDecodingContext *ctx, ReorderBufferTXN *txn)
{
	wait_for_candidates(ctx, txn->end_lsn);
	pgoutput.begin_prepare_cb(ctx, txn);
}

static void
prepare(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr prepare_lsn)
{
	wait_for_candidates(ctx, txn->end_lsn);
	pgoutput.prepare_cb(ctx, txn, prepare_lsn);
}

static void
commit_prepared(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr commit_lsn)
{
	wait_for_candidates(ctx, txn->end_lsn);
	pgoutput.commit_prepared_cb(ctx, txn, commit_lsn);
}

/* A standby that lacks the rollback still has the transaction prepared, and may commit it. */
static void
rollback_prepared(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr prepare_end_lsn,
				  TimestampTz prepare_time)
{
	wait_for_candidates(ctx, txn->end_lsn);
	pgoutput.rollback_prepared_cb(ctx, txn, prepare_end_lsn, prepare_time);
}

static void
stream_prepare(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr prepare_lsn)
{
	wait_for_candidates(ctx, txn->end_lsn);
	pgoutput.stream_prepare_cb(ctx, txn, prepare_lsn);
}

static void
stream_commit(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr commit_lsn)
{
	wait_for_candidates(ctx, txn->end_lsn);
	pgoutput.stream_commit_cb(ctx, txn, commit_lsn);
}
#endif

/* Put `ours` in front of pgoutput's callback; the server checks which ones exist, so a missing one stays NULL. */
#define GATE(callback, ours) \
	do { \
		if (callbacks->callback != NULL) \
			callbacks->callback = (ours); \
	} while (0)

void
_PG_output_plugin_init(OutputPluginCallbacks *callbacks)
{
	LogicalOutputPluginInit init = (LogicalOutputPluginInit)
		load_external_function("$libdir/pgoutput", "_PG_output_plugin_init", true, NULL);

	init(callbacks);
	pgoutput = *callbacks;
	GATE(begin_cb, begin);
	GATE(commit_cb, commit);
	GATE(message_cb, message);
#if HAS_TWO_PHASE
	GATE(begin_prepare_cb, begin_prepare);
	GATE(prepare_cb, prepare);
	GATE(commit_prepared_cb, commit_prepared);
	GATE(rollback_prepared_cb, rollback_prepared);
	GATE(stream_prepare_cb, stream_prepare);
	GATE(stream_commit_cb, stream_commit);
#endif
}

void
_PG_init(void)
{
	DefineCustomStringVariable("tuskline.wait_for_slots",
							   "Physical slots whose standbys must have a transaction before the output plugin "
							   "\"tuskline\" ends it.",
							   "Names with commas between them; empty: it does not wait.",
							   &wait_for_slots,
							   "",
							   PGC_USERSET,
							   GUC_LIST_INPUT,
							   NULL,
							   NULL,
							   NULL);
}
