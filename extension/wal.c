/*
 * The WAL that a slot depends on, from its restart_lsn on.
 *
 * Nothing here is a promise about the next moment, except for a slot whose restart_lsn was published before: the
 * server then keeps the segments from it on, unless it had already chosen them for removal. That is why a copy's
 * files are checked again at each poll (inspect), not only when it is created.
 */
#include "tuskline.h"

#include <fcntl.h>
#include <unistd.h>

#include "storage/fd.h"

/* More segments than any server keeps; older positions are not searched. */
#define MOST_SEGMENTS ((XLogSegNo) 1 << 24)

/* The end of the WAL that this server has applied (a standby) or written (a primary), and its timeline. */
XLogRecPtr
wal_end(TimeLineID *timeline)
{
	if (RecoveryInProgress())
		return GetXLogReplayRecPtr(timeline);
	*timeline = PG_UINT32_MAX;
	return GetXLogWriteRecPtr();
}

/*
 * The oldest segment, not before that of `from`, from which all WAL up to wal_end is there; one past the end's
 * segment if there is none.
 *
 * XLogGetLastRemovedSegno() returns 0 until a segment was removed since the start, so the files decide; it is checked
 * as well because it advances before the files are removed.
 */
XLogSegNo
wal_oldest_segment(XLogRecPtr from)
{
	TimeLineID	timeline;
	XLogRecPtr	end = wal_end(&timeline);
	XLogSegNo	first;
	XLogSegNo	last;
	XLogSegNo	oldest;
	XLogSegNo	removed = XLogGetLastRemovedSegno();
	bool	   *is_there;
	DIR		   *directory;
	struct dirent *entry;

	if (XLogRecPtrIsInvalid(end))
		return PG_UINT64_MAX;
	XLByteToSeg(from, first, wal_segment_size);
	XLByteToPrevSeg(end, last, wal_segment_size);
	if (first > last)
		return first;
	first = Max(first, removed + 1);
	if (last >= MOST_SEGMENTS)
		first = Max(first, last - MOST_SEGMENTS + 1);
	if (first > last)
		return last + 1;
	is_there = palloc0(last - first + 1);
	directory = AllocateDir(XLOGDIR);
	while ((entry = ReadDir(directory, XLOGDIR)) != NULL)
	{
		TimeLineID	of_timeline;
		XLogSegNo	segment;

		if (!IsXLogFileName(entry->d_name))
			continue;
		XLogFromFileName(entry->d_name, &of_timeline, &segment, wal_segment_size);
		if (segment >= first && segment <= last && of_timeline <= timeline)
			is_there[segment - first] = true;
	}
	FreeDir(directory);
	for (oldest = last + 1; oldest > first && is_there[oldest - 1 - first]; oldest--)
		;
	pfree(is_there);
	return oldest;
}

/* Read the record at `from`, or the next one if that is invalid; ERROR if there is none. */
void
read_next_record(XLogReaderState *reader, XLogRecPtr from)
{
	char	   *problem = NULL;

	if (compat_read_record(reader, from, &problem) == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("could not read WAL after " LSN_TEXT ": %s", LSN_PARTS(reader->EndRecPtr),
						problem ? problem : "no record found"),
				 errhint("Check whether WAL files are missing from pg_wal on this standby.")));
}

/* Whether all WAL from `from` to wal_end exists. */
bool
wal_present(XLogRecPtr from)
{
	XLogSegNo	segment;

	XLByteToSeg(from, segment, wal_segment_size);
	return segment >= wal_oldest_segment(from);
}
