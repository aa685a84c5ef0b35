/*
 * The incarnation id of a slot, in a small file in the slot's directory: the marker. A slot of the primary has the id that
 * mark() wrote; a copy has the temporary name under which it was reserved, and keeps it when it is renamed.
 *
 * A slot's values can return to exactly the same numbers after it was dropped and created again, and what it reserved in
 * between is lost. The file cannot: PostgreSQL removes the directory with the slot, and a crash does not touch it. It is
 * written once and never changed. The server itself reads only the file `state` in that directory.
 *
 * ReplicationSlotAllocationLock is held shared meanwhile. Creating and dropping a slot hold it exclusively, so the
 * directory belongs to the slot that was found.
 */
#include "tuskline.h"

#include <fcntl.h>
#include <unistd.h>

#include "storage/fd.h"
#include "storage/lwlock.h"
#include "utils/builtins.h"

PG_FUNCTION_INFO_V1(tuskline_mark);
PG_FUNCTION_INFO_V1(tuskline_marker);

static void
marker_path(char *path, const char *slot_name, const char *suffix)
{
	snprintf(path, MAXPGPATH, "pg_replslot/%s/tuskline_marker%s", slot_name, suffix);
}

static bool
is_marker(const char *value, size_t length)
{
	return length >= 1 && length <= MARKER_LENGTH &&
		strspn(value, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-") == length;
}

/* Read the incarnation id of a slot into `value` (MARKER_LENGTH + 1 bytes). A file that cannot be read is an ERROR. */
MarkerState
read_marker(const char *slot_name, char *value)
{
	char		path[MAXPGPATH];
	char		text[MARKER_LENGTH + 2];
	ssize_t		length;

	marker_path(path, slot_name, "");
	length = read_beginning(path, text, sizeof(text), NULL);
	if (length < 0)
		return MARKER_NONE;
	if (length > 0 && length < sizeof(text))
		text[length] = '\0';
	if (length < 2 || length == sizeof(text) || text[length - 1] != '\n' ||
		!is_marker(text, length - 1))
		return MARKER_DAMAGED;
	text[length - 1] = '\0';
	strcpy(value, text);
	return MARKER_READ;
}

/* Write the incarnation id of a slot that has none; it is on disk on return. The caller keeps the slot from being dropped. */
void
write_marker(const char *slot_name, const char *value)
{
	char		path[MAXPGPATH];
	char		unfinished[MAXPGPATH];
	char		text[MARKER_LENGTH + 2];
	int			length = snprintf(text, sizeof(text), "%s\n", value);
	int			file;

	marker_path(path, slot_name, "");
	marker_path(unfinished, slot_name, ".tmp");
	file = OpenTransientFile(unfinished, O_CREAT | O_TRUNC | O_WRONLY | PG_BINARY);
	if (file < 0)
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not create file \"%s\": %m", unfinished)));
	errno = 0;
	if (write(file, text, length) != length)
	{
		if (errno == 0)
			errno = ENOSPC;
		ereport(ERROR, (errcode_for_file_access(), errmsg("could not write file \"%s\": %m", unfinished)));
	}
	CloseTransientFile(file);
	FAIL_POINT("mark.written");
	durable_rename(unfinished, path, ERROR);
}

/* marker(slot_name): the incarnation id of a slot; NULL if it has none, or a damaged one. */
Datum
tuskline_marker(PG_FUNCTION_ARGS)
{
	char	   *slot_name = name_argument(fcinfo, 0, "slot_name");
	char		marker[MARKER_LENGTH + 1];
	ReplicationSlot slot;
	bool		found;

	LWLockAcquire(ReplicationSlotAllocationLock, LW_SHARED);
	found = find_slot(slot_name, &slot) && read_marker(slot_name, marker) == MARKER_READ;
	LWLockRelease(ReplicationSlotAllocationLock);
	if (!found)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(marker));
}

/* mark(slot_name, value): the incarnation id of a slot, written with `value` if there is none. */
Datum
tuskline_mark(PG_FUNCTION_ARGS)
{
	char	   *slot_name = name_argument(fcinfo, 0, "slot_name");
	char		marker[MARKER_LENGTH + 1];
	char	   *value;
	ReplicationSlot slot;

	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("value must not be null"),
				 errhint("Specify a value.")));
	value = text_to_cstring(PG_GETARG_TEXT_PP(1));
	if (!is_marker(value, strlen(value)))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid incarnation id"),
				 errdetail("An incarnation id consists of 1 to %d ASCII letters, digits, underscores, or hyphens.", MARKER_LENGTH),
				 errhint("Specify a random value, such as a UUID.")));
	require_no_slot_in_hand();
	LWLockAcquire(ReplicationSlotAllocationLock, LW_SHARED);
	if (!find_slot(slot_name, &slot))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("replication slot \"%s\" does not exist", slot_name),
				 errhint("Specify the slot in the standby's primary_slot_name.")));
	if (slot.data.persistency != RS_PERSISTENT)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("replication slot \"%s\" is not persistent", slot_name),
				 errhint("A temporary slot is dropped with its session, and needs no incarnation id.")));
	switch (read_marker(slot_name, marker))
	{
		case MARKER_READ:
			break;
		case MARKER_NONE:
			write_marker(slot_name, value);
			strcpy(marker, value);
			break;
		case MARKER_DAMAGED:
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("file \"pg_replslot/%s/tuskline_marker\" does not contain a valid incarnation id", slot_name),
					 errhint("Move the file away. The copies that depend on it are then proven again.")));
	}
	LWLockRelease(ReplicationSlotAllocationLock);
	PG_RETURN_TEXT_P(cstring_to_text(marker));
}
