/*
 * The mapping files of rewritten catalogs, pg_logical/mappings/map-*: checks whether all those of a slot exist, and restores
 * missing ones.
 *
 * VACUUM FULL or CLUSTER of a catalog moves its rows. A decoder finds a transaction's own catalog changes by where its
 * rows were, so the server logs the moves (XLOG_HEAP2_REWRITE), and replay writes them into a file for each transaction.
 * A decoder that lacks a file does not see the transaction's changes: it leaves out rows of a table that was published by
 * the transaction itself, silently, or cannot find a relation.
 *
 * A restartpoint removes the files that no logical slot of its server needs, which are all of them where there is no
 * such slot. A copy is created with the positions of a slot on another server, so its files may be gone already. And each slot
 * is kept up to its files from then on: replay writes them, and restartpoints leave those from its restart_lsn on.
 *
 * So restore_mappings reads WAL from the slot's restart_lsn to what has been replayed, and writes once more what replay
 * did. What it writes is the same, byte for byte, and replay itself only adds to a file behind what was replayed before, so
 * neither harms the other. A file's position is where the rewrite began: files from before restart_lsn are of transactions
 * that are not decoded from there on, since rows that a rewrite moves were written before it.
 *
 * One restartpoint can still remove files afterwards: one that read the slots before this one existed. It has
 * published its redo position (GetRedoRecPtr) before that read, and is past the removal when the control file has that
 * position, too. While these differ nothing is restored.
 *
 * A note, pg_replslot/<slot>/tuskline_mappings, records that it was done. Its unfinished form lies in the same folder all
 * the time that WAL is read: a slot that was dropped meanwhile, and created again, has none to rename. The server removes
 * the note with the slot. It is void once restart_lsn goes back; set_fields removes it then.
 */
#include "tuskline.h"

#include <fcntl.h>
#include <unistd.h>

#include "access/heapam_xlog.h"
#include "access/rewriteheap.h"
#include "replication/slot.h"
#include "storage/fd.h"
#include "storage/lwlock.h"
#include "utils/pg_lsn.h"

PG_FUNCTION_INFO_V1(tuskline_restore_mappings);

#define MAPPINGS "pg_logical/mappings"
#define NOTE "pg_replslot/%s/tuskline_mappings"

/* Whether all mapping files that a decoder of this slot may need exist, and will be kept. */
bool
mappings_complete(const char *slot_name)
{
	char		path[MAXPGPATH];

	snprintf(path, sizeof(path), NOTE, slot_name);
	if (access(path, F_OK) == 0)
		return true;
	if (errno != ENOENT)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not access file \"%s\": %m", path)));
	return false;
}

static void
begin_note(const char *unfinished)
{
	int			file = OpenTransientFile(unfinished, O_CREAT | O_TRUNC | O_WRONLY | PG_BINARY);

	if (file < 0)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not create file \"%s\": %m", unfinished)));
	CloseTransientFile(file);
}

/* The note of a slot whose files are known to exist: one that replaces another at the same position. */
void
note_mappings(const char *slot_name)
{
	char		path[MAXPGPATH];
	char		unfinished[MAXPGPATH];

	snprintf(path, sizeof(path), NOTE, slot_name);
	snprintf(unfinished, sizeof(unfinished), NOTE ".%d.tmp", slot_name, MyProcPid);
	begin_note(unfinished);
	durable_rename(unfinished, path, ERROR);
}

/* The restored files are no longer sufficient. Durable before the slot itself changes. */
void
forget_mappings(const char *slot_name)
{
	char		path[MAXPGPATH];

	snprintf(path, sizeof(path), NOTE, slot_name);
	if (mappings_complete(slot_name))
		durable_unlink(path, ERROR);
}

static void
require_no_restartpoint(void)
{
	XLogRecPtr	begun = GetRedoRecPtr();
	ControlFileData *control;
	bool		crc_ok;

	LWLockAcquire(ControlFileLock, LW_SHARED);
	control = compat_control_file(&crc_ok);
	LWLockRelease(ControlFileLock);
	if (!crc_ok || control->checkPointCopy.redo < begun)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("a restartpoint is in progress on this standby"),
				 errdetail("The restartpoint may have started before the slot was created, and may remove mapping files that the slot needs."),
				 errhint("Retry when the restartpoint has completed. CHECKPOINT on this standby completes it soon.")));
}

/* Write once more what replay of the record that was just read has written, if a decoder from `begin` on may need it. */
static void
restore_mapping(XLogReaderState *reader, XLogRecPtr begin)
{
	xl_heap_rewrite_mapping *record = (xl_heap_rewrite_mapping *) XLogRecGetData(reader);
	size_t		length = record->num_mappings * sizeof(LogicalRewriteMappingData);
	char		path[MAXPGPATH];
	int			file;

	if (record->start_lsn < begin)
		return;
	snprintf(path, sizeof(path), MAPPINGS "/" LOGICAL_REWRITE_FORMAT, record->mapped_db, record->mapped_rel,
			 LSN_PARTS(record->start_lsn), record->mapped_xid, XLogRecGetXid(reader));
	file = OpenTransientFile(path, O_CREAT | O_WRONLY | PG_BINARY);
	if (file < 0)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not create file \"%s\": %m", path)));
	errno = 0;
	if (pwrite(file, XLogRecGetData(reader) + sizeof(xl_heap_rewrite_mapping), length, record->offset) != length)
	{
		if (errno == 0)
			errno = ENOSPC;
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not write to file \"%s\": %m", path)));
	}
	if (pg_fsync(file) != 0)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not fsync file \"%s\": %m", path)));
	CloseTransientFile(file);
}

static void
restore_from(XLogReaderState *reader, XLogRecPtr begin, XLogRecPtr upto)
{
	XLogRecPtr	from = begin;

	while (!XLogRecPtrIsInvalid(from) ? from < upto : reader->EndRecPtr < upto)
	{
		read_next_record(reader, from);
		from = InvalidXLogRecPtr;
		if (XLogRecGetRmid(reader) == RM_HEAP2_ID &&
			(XLogRecGetInfo(reader) & XLOG_HEAP_OPMASK) == XLOG_HEAP2_REWRITE)
			restore_mapping(reader, begin);
		CHECK_FOR_INTERRUPTS();
	}
	fsync_fname(MAPPINGS, true);
}

/* The restart_lsn of the slot of that name; its folder has the unfinished note on return. */
static XLogRecPtr
begin_restoring(const char *name, const char *unfinished)
{
	ReplicationSlot slot;

	LWLockAcquire(ReplicationSlotAllocationLock, LW_SHARED);
	if (!find_slot(name, &slot))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("replication slot \"%s\" does not exist", name),
				 errhint("Create the slot with reserve().")));
	if (SlotIsPhysical(&slot) || XLogRecPtrIsInvalid(slot.data.restart_lsn))
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("replication slot \"%s\" is physical, or has no restart_lsn", name),
				 errhint("Specify a logical slot.")));
	begin_note(unfinished);
	LWLockRelease(ReplicationSlotAllocationLock);
	return slot.data.restart_lsn;
}

static void
finish_note(const char *name, const char *unfinished)
{
	char		path[MAXPGPATH];

	snprintf(path, sizeof(path), NOTE, name);
	LWLockAcquire(ReplicationSlotAllocationLock, LW_SHARED);
	if (access(unfinished, F_OK) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("replication slot \"%s\" was concurrently dropped", name),
				 errhint("Retry with the present slot.")));
	durable_rename(unfinished, path, ERROR);
	LWLockRelease(ReplicationSlotAllocationLock);
}

/*
 * restore_mappings(slot_name) -> the position up to which WAL was read
 *
 * For any logical slot, PostgreSQL's own copies included: the slot itself is neither taken nor changed.
 */
Datum
tuskline_restore_mappings(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo, 0, "slot_name");
	char		unfinished[MAXPGPATH];
	XLogReaderState *reader;
	TimeLineID	timeline;
	volatile XLogRecPtr upto = InvalidXLogRecPtr;
	volatile bool begun = false;

	require_standby();
	require_no_slot_in_hand();
	snprintf(unfinished, sizeof(unfinished), NOTE ".%d.tmp", name, MyProcPid);
	reader = compat_reader();
	PG_TRY();
	{
		XLogRecPtr	begin = begin_restoring(name, unfinished);

		begun = true;
		require_wal(begin);
		require_no_restartpoint();
		upto = wal_end(&timeline);
		restore_from(reader, begin, upto);
		FAIL_POINT("mappings.restored");
		finish_note(name, unfinished);
	}
	PG_CATCH();
	{
		LWLockReleaseAll();
		compat_close_segment(reader);
		if (begun)
			(void) unlink(unfinished);
		PG_RE_THROW();
	}
	PG_END_TRY();
	XLogReaderFree(reader);
	PG_RETURN_LSN(upto);
}
