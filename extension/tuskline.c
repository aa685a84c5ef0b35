/*
 * Tuskline's extension: copies of logical replication slots on a server in recovery.
 *
 * PostgreSQL's slot API is made for callers inside the server: it checks little, and a wrong call shows as rows
 * that a decoder misses months later. So each function here rejects, with an ordinary ERROR, anything that it cannot
 * prove correct, before it changes anything; this file contains the shared checks, and reads small files.
 */
#include "tuskline.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include "commands/dbcommands.h"
#include "storage/fd.h"
#include "storage/lwlock.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/pg_lsn.h"

PG_MODULE_MAGIC;

bool
has_temporary_name(const char *name)
{
	return strncmp(name, TEMPORARY_PREFIX, strlen(TEMPORARY_PREFIX)) == 0;
}

/* Copy a slot's state in shared memory; false if there is none of that name. */
bool
find_slot(const char *name, ReplicationSlot *found)
{
	bool		is_there = false;

	LWLockAcquire(ReplicationSlotControlLock, LW_SHARED);
	for (int i = 0; i < max_replication_slots && !is_there; i++)
	{
		ReplicationSlot *slot = &ReplicationSlotCtl->replication_slots[i];

		if (!slot->in_use || strcmp(NameStr(slot->data.name), name) != 0)
			continue;
		SpinLockAcquire(&slot->mutex);
		*found = *slot;
		SpinLockRelease(&slot->mutex);
		is_there = true;
	}
	LWLockRelease(ReplicationSlotControlLock);
	return is_there;
}

/* A process owns at most one slot. One that decodes calls us from inside its output plugin. */
void
require_no_slot_in_hand(void)
{
	if (MyReplicationSlot != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("this session already uses replication slot \"%s\"",
						NameStr(MyReplicationSlot->data.name)),
				 errhint("Call the function from a session that does not decode.")));
	CheckSlotRequirements();
}

void
require_standby(void)
{
	if (!RecoveryInProgress())
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("this server is not in recovery"),
				 errdetail("Copies of slots can be created on standbys only."),
				 errhint("Connect to the standby.")));
}

/*
 * Both this server's setting and the one with which the replayed WAL was written. With a lower setting here a
 * standby that has a logical slot cannot restart.
 */
void
require_logical_wal(void)
{
	ControlFileData *control;
	bool		crc_ok;

	if (wal_level < WAL_LEVEL_LOGICAL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("logical replication slots require wal_level = logical on this server"),
				 errdetail("A standby that has logical slots cannot start with a lower setting."),
				 errhint("Set wal_level = logical on this server, and restart it.")));
	LWLockAcquire(ControlFileLock, LW_SHARED);
	control = compat_control_file(&crc_ok);
	LWLockRelease(ControlFileLock);
	if (!crc_ok)
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("incorrect checksum in control file"),
				 errhint("Check the control file with pg_controldata.")));
	if (control->wal_level < WAL_LEVEL_LOGICAL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("logical replication slots require wal_level = logical on the primary"),
				 errdetail("The WAL that this standby replays was written with a lower setting."),
				 errhint("Set wal_level = logical on the primary, and restart it.")));
}

/* Refuse a slot that is not a persistent logical one of this database, or is PostgreSQL's own copy. */
void
require_ours(const ReplicationSlot *slot)
{
	const char *name = NameStr(slot->data.name);

	if (SlotIsPhysical(slot))
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("replication slot \"%s\" is physical", name),
				 errhint("Specify a logical slot.")));
	if (slot->data.database != MyDatabaseId)
	{
		char	   *database = get_database_name(slot->data.database);

		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("replication slot \"%s\" belongs to database \"%s\"", name, database ? database : "?"),
				 errhint("Connect to that database.")));
	}
	if (slot->data.persistency != RS_PERSISTENT)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("replication slot \"%s\" is temporary", name),
				 errdetail("A temporary slot is dropped at the end of its session."),
				 errhint("Specify a persistent slot.")));
	if (compat_synced(&slot->data))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("replication slot \"%s\" is synchronized by PostgreSQL", name),
				 errhint("Leave the slot to sync_replication_slots, or set its failover property to false on the primary.")));
}

/* Refuse also one that is invalid, which can only be dropped. */
void
require_usable(const ReplicationSlot *slot)
{
	const char *invalidation = compat_invalidation(&slot->data);

	require_ours(slot);
	if (invalidation != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("replication slot \"%s\" is invalid", NameStr(slot->data.name)),
				 errdetail("The reason is \"%s\".", invalidation),
				 errhint("Drop the slot, and create it again.")));
}

static void
require_not_null(FunctionCallInfo fcinfo, int number, const char *what)
{
	if (PG_ARGISNULL(number))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", what),
				 errhint("Specify a value.")));
}

char *
name_argument(FunctionCallInfo fcinfo, int number, const char *what)
{
	require_not_null(fcinfo, number, what);
	return NameStr(*PG_GETARG_NAME(number));
}

XLogRecPtr
lsn_argument(FunctionCallInfo fcinfo, int number, const char *what)
{
	XLogRecPtr	lsn;

	require_not_null(fcinfo, number, what);
	lsn = PG_GETARG_LSN(number);
	if (XLogRecPtrIsInvalid(lsn))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid %s: 0/0", what),
				 errdetail("This is not a position in the WAL."),
				 errhint("Specify the value of the slot on the primary.")));
	return lsn;
}

bool
bool_argument(FunctionCallInfo fcinfo, int number, const char *what)
{
	require_not_null(fcinfo, number, what);
	return PG_GETARG_BOOL(number);
}

/*
 * Read a file's first bytes and, unless `length` is NULL, the length of all of it; how many bytes there were, or -1 if
 * there is no such file.
 */
ssize_t
read_beginning(const char *path, void *into, size_t size, off_t *length)
{
	ssize_t		count;
	int			file = OpenTransientFile(path, O_RDONLY | PG_BINARY);

	if (file < 0)
	{
		if (errno == ENOENT)
			return -1;
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not open file \"%s\": %m", path)));
	}
	count = read(file, into, size);
	if (length != NULL)
		*length = lseek(file, 0, SEEK_END);
	if (count < 0 || (length != NULL && *length < 0))
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not read file \"%s\": %m", path)));
	CloseTransientFile(file);
	return count;
}

#ifdef TUSKLINE_FAIL_POINTS
void
fail_point(const char *name)
{
	const char *wanted = GetConfigOption("tuskline.fail_point", true, false);

	if (wanted != NULL && strcmp(wanted, name) == 0)
		kill(MyProcPid, SIGKILL);
}
#endif
