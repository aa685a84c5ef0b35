/*
 * The snapshots that decoders start with, pg_logical/snapshots/<lsn>.snap: whether one is there, and whether it is whole.
 *
 * A snapshot lists the transactions that changed the catalog, as far as its decoder has noted them. The server's
 * fast-forward advance (pg_replication_slot_advance, and its own slot synchronization) does not read the records that
 * announce changes of user_catalog_table tables, and before 14 those of all catalogs in subtransactions. A decoder
 * that starts from such a snapshot sees the catalog without these transactions, and sends wrong rows, or none,
 * silently.
 *
 * The files are shared by all slots of a server, which never overwrites one. The existence of a file therefore does
 * not show which decoder wrote it, and a snapshot counts as complete only if we wrote it, with a decoder that leaves
 * nothing out (advance.c). A note beside it, <lsn>.snap.tuskline, records that: a copy of the snapshot's first bytes,
 * which contain a checksum of all of it, and its length. The server removes a note with its snapshot, since it
 * matches only the beginning of a name when it removes snapshots that no slot needs.
 *
 * The order of writes: our snapshot is written under a position that no record has (records begin at multiples of 8),
 * then its note, and then the snapshot is renamed over the existing file. A process that opens the name meanwhile
 * finds the old file or the new one, and a note that exists too early matches no file.
 */
#include "tuskline.h"

#include <fcntl.h>
#include <unistd.h>

#include "replication/reorderbuffer.h"
#include "replication/snapbuild.h"
#include "storage/fd.h"
#include "storage/lock.h"

#define SNAPSHOTS "pg_logical/snapshots"
#define NOTE_SUFFIX ".tuskline"
#define SNAPSHOT_PATH SNAPSHOTS "/%X-%X.snap"

/* Magic, checksum of the rest, version, length: how a snapshot begins from 11 to 18 (SnapBuildOnDisk). */
#define HEADER_LENGTH 16

/* Of the struct SnapBuild that follows, from 16 to 18: its length, and where committed.xcnt and catchange.xcnt are. */
#define BUILDER_LENGTH 128
#define COMMITTED_COUNT 80
#define IN_PROGRESS_COUNT 112

/* The meaning of a note; another number invalidates all older ones. Before 16 the first ones meant less (advance.c). */
#define NOTE_VERSION (PG_VERSION_NUM >= 160000 ? 1 : 2)

/* The third number of the lock by which one process at a time writes snapshots of ours; users' own have 1 and 2. */
#define LOCK_CLASS 3

typedef struct Note
{
	uint32		version;
	uint32		length;
	char		header[HEADER_LENGTH];
} Note;

/* Read the note about the snapshot in this file; false if there is none, or a truncated one. */
static bool
describe(const char *path, Note *note)
{
	off_t		length;

	memset(note, 0, sizeof(Note));
	note->version = NOTE_VERSION;
	if (read_beginning(path, note->header, HEADER_LENGTH, &length) != HEADER_LENGTH)
		return false;
	note->length = (uint32) length;
	return true;
}

/* Whether a decoder can start at `lsn` with a snapshot of any decoder. */
bool
snapshot_present(XLogRecPtr lsn)
{
	char		path[MAXPGPATH];
	char		first;
	off_t		length;

	snprintf(path, sizeof(path), SNAPSHOT_PATH, LSN_PARTS(lsn));
	return read_beginning(path, &first, 1, &length) == 1;
}

/* Whether the snapshot at `lsn` is one that we wrote: nothing is missing in it. */
bool
snapshot_complete(XLogRecPtr lsn)
{
	char		path[MAXPGPATH];
	Note		is;
	Note		noted;
	off_t		length;

	snprintf(path, sizeof(path), SNAPSHOT_PATH, LSN_PARTS(lsn));
	if (!describe(path, &is))
		return false;
	snprintf(path, sizeof(path), SNAPSHOT_PATH NOTE_SUFFIX, LSN_PARTS(lsn));
	return read_beginning(path, &noted, sizeof(Note), &length) == sizeof(Note) &&
		memcmp(&is, &noted, sizeof(Note)) == 0;
}

static void
write_note(const char *path, const Note *note)
{
	char		unfinished[MAXPGPATH];
	int			file;

	snprintf(unfinished, sizeof(unfinished), "%s.%d.tmp", path, MyProcPid);
	file = OpenTransientFile(unfinished, O_CREAT | O_TRUNC | O_WRONLY | PG_BINARY);
	if (file < 0)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not create file \"%s\": %m", unfinished)));
	errno = 0;
	if (write(file, note, sizeof(Note)) != sizeof(Note))
	{
		if (errno == 0)
			errno = ENOSPC;
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not write file \"%s\": %m", unfinished)));
	}
	CloseTransientFile(file);
	durable_rename(unfinished, path, ERROR);
}

/*
 * Write the builder's snapshot at `lsn`, the start of the record that it is about to be given. The builder has to be
 * consistent, and its own snapshot complete; a file of another decoder under that name is replaced.
 */
void
write_snapshot(struct SnapBuild *builder, XLogRecPtr lsn)
{
	char		path[MAXPGPATH];
	char		aside[MAXPGPATH];
	char		note_path[MAXPGPATH];
	LOCKTAG		lock;
	Note		note;

	if (snapshot_complete(lsn))
		return;
	snprintf(path, sizeof(path), SNAPSHOT_PATH, LSN_PARTS(lsn));
	snprintf(aside, sizeof(aside), SNAPSHOT_PATH, LSN_PARTS(lsn - 1));
	snprintf(note_path, sizeof(note_path), SNAPSHOT_PATH NOTE_SUFFIX, LSN_PARTS(lsn));
	SET_LOCKTAG_ADVISORY(lock, InvalidOid, 0, 0, LOCK_CLASS);
	(void) LockAcquire(&lock, ExclusiveLock, false, false);
	if (!snapshot_complete(lsn))
	{
		/* A leftover of a crash: the server would not overwrite it. */
		if (unlink(aside) != 0 && errno != ENOENT)
			ereport(ERROR, (errcode_for_file_access(), errmsg("could not remove file \"%s\": %m", aside)));
		SnapBuildSerializationPoint(builder, lsn - 1);
		if (!describe(aside, &note))
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("file \"%s\" does not exist although it was just written", aside)));
		write_note(note_path, &note);
		FAIL_POINT("snapshot.noted");
		durable_rename(aside, path, ERROR);
	}
	LockRelease(&lock, ExclusiveLock, false);
}

/*
 * The newest position of a snapshot that has no note: another decoder wrote it. A decoder that continues from an older one
 * leaves that file as it is and may start with it later. Only the names are read: there may be thousands.
 */
XLogRecPtr
newest_foreign_snapshot(void)
{
	XLogRecPtr	newest = InvalidXLogRecPtr;
	DIR		   *directory = AllocateDir(SNAPSHOTS);
	struct dirent *entry;

	while ((entry = ReadDir(directory, SNAPSHOTS)) != NULL)
	{
		char		note_path[MAXPGPATH];
		uint32		high;
		uint32		low;
		XLogRecPtr	lsn;
		int			end = 0;

		if (sscanf(entry->d_name, "%X-%X.snap%n", &high, &low, &end) != 2 || end == 0 || entry->d_name[end] != '\0')
			continue;
		lsn = (uint64) high << 32 | low;
		if (lsn <= newest || lsn % 8 != 0)
			continue;
		snprintf(note_path, sizeof(note_path), SNAPSHOTS "/%s" NOTE_SUFFIX, entry->d_name);
		if (access(note_path, F_OK) != 0 && errno == ENOENT)
			newest = lsn;
	}
	FreeDir(directory);
	return newest;
}

#if PG_VERSION_NUM >= 160000
/*
 * The transactions in progress that the snapshot at `lsn` names as having changed the catalog, for a decoder that was just
 * started from it. The file is as snapbuild.c writes it (SnapBuildOnDisk): a header, the builder, two lists of xids.
 */
void
recall_changes_in_progress(struct ReorderBuffer *reorder, XLogRecPtr lsn)
{
	char		path[MAXPGPATH];
	char		beginning[HEADER_LENGTH + BUILDER_LENGTH];
	size_t		committed;
	size_t		in_progress;
	off_t		length;
	int			file;

	snprintf(path, sizeof(path), SNAPSHOT_PATH, LSN_PARTS(lsn));
	if (read_beginning(path, beginning, sizeof(beginning), &length) != sizeof(beginning))
		ereport(ERROR, (errcode(ERRCODE_DATA_CORRUPTED), errmsg("file \"%s\" is too short", path)));
	memcpy(&committed, beginning + HEADER_LENGTH + COMMITTED_COUNT, sizeof(size_t));
	memcpy(&in_progress, beginning + HEADER_LENGTH + IN_PROGRESS_COUNT, sizeof(size_t));
	if ((uint64) length != sizeof(beginning) + (committed + in_progress) * sizeof(TransactionId))
		ereport(ERROR, (errcode(ERRCODE_DATA_CORRUPTED), errmsg("file \"%s\" has an unexpected layout", path)));
	file = OpenTransientFile(path, O_RDONLY | PG_BINARY);
	if (file < 0 || lseek(file, sizeof(beginning) + committed * sizeof(TransactionId), SEEK_SET) < 0)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not open file \"%s\": %m", path)));
	while (in_progress-- > 0)
	{
		TransactionId xid;

		if (read(file, &xid, sizeof(xid)) != sizeof(xid))
			ereport(ERROR, (errcode_for_file_access(), errmsg("could not read file \"%s\": %m", path)));
		ReorderBufferXidSetCatalogChanges(reorder, xid, lsn);
	}
	CloseTransientFile(file);
}
#endif
