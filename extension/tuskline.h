/*
 * What the parts of the extension share: positions in WAL, the files that prove a slot, and refusals.
 */
#ifndef TUSKLINE_H
#define TUSKLINE_H

#include "compatibility.h"

#include "access/xlog_internal.h"
#include "fmgr.h"
#include "storage/spin.h"

/* A slot under a name with this prefix is being proven; no client uses it, and none of it survives a promotion. */
#define TEMPORARY_PREFIX "_tuskline_tmp_"

/* A position as errors print it. */
#define LSN_TEXT "%X/%X"
#define LSN_PARTS(lsn) (uint32) ((lsn) >> 32), (uint32) (lsn)

/* The longest incarnation id, in bytes. */
#define MARKER_LENGTH 64

/*
 * PGXS hides a module's functions from other modules since PostgreSQL 16 only; without that, another module's function
 * of the same name might be called instead of ours.
 */
#pragma GCC visibility push(hidden)

/* tuskline.c */
extern bool has_temporary_name(const char *name);
extern bool find_slot(const char *name, ReplicationSlot *found);
extern void require_no_slot_in_hand(void);
extern void require_standby(void);
extern void require_logical_wal(void);
extern void require_ours(const ReplicationSlot *slot);
extern void require_usable(const ReplicationSlot *slot);
extern char *name_argument(FunctionCallInfo fcinfo, int number, const char *what);
extern XLogRecPtr lsn_argument(FunctionCallInfo fcinfo, int number, const char *what);
extern bool bool_argument(FunctionCallInfo fcinfo, int number, const char *what);
extern ssize_t read_beginning(const char *path, void *into, size_t size, off_t *length);

/* copies.c */
extern void let_go(void);
extern void require_order(XLogRecPtr restart_lsn, XLogRecPtr confirmed_flush);
extern void require_wal(XLogRecPtr restart_lsn);
extern void take_slot(const char *name);

/* wal.c */
extern XLogRecPtr wal_end(TimeLineID *timeline);
extern XLogSegNo wal_oldest_segment(XLogRecPtr from);
extern bool wal_present(XLogRecPtr from);
extern void read_next_record(XLogReaderState *reader, XLogRecPtr from);

/* mappings.c */
extern bool mappings_complete(const char *slot_name);
extern void note_mappings(const char *slot_name);
extern void forget_mappings(const char *slot_name);

/* snapshots.c */
struct SnapBuild;

extern bool snapshot_present(XLogRecPtr lsn);
extern bool snapshot_complete(XLogRecPtr lsn);
extern XLogRecPtr newest_foreign_snapshot(void);
extern void write_snapshot(struct SnapBuild *builder, XLogRecPtr lsn);
#if PG_VERSION_NUM >= 160000
extern void recall_changes_in_progress(struct ReorderBuffer *reorder, XLogRecPtr lsn);
#endif

/* marker.c */
typedef enum MarkerState
{
	MARKER_NONE,
	MARKER_READ,
	MARKER_DAMAGED
} MarkerState;

extern MarkerState read_marker(const char *slot_name, char *value);
extern void write_marker(const char *slot_name, const char *value);

/* plugin.c */
extern void require_plugin(char *plugin);

/*
 * Where a test terminates the server process, named by the setting tuskline.fail_point. It is compiled only if the
 * build requests it.
 */
#ifdef TUSKLINE_FAIL_POINTS
extern void fail_point(const char *name);
#define FAIL_POINT(name) fail_point(name)
#else
#define FAIL_POINT(name) ((void) 0)
#endif

#pragma GCC visibility pop

#endif
