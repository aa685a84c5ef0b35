/*
 * What differs between PostgreSQL 11 and 18, behind one name each; no other file asks for the version.
 *
 * Only signatures and members differ here. Where behavior differs between minor releases of one major, which a
 * library meets after it was compiled, the code does what is right on all of them (see reserve_xmin in copies.c).
 */
#ifndef TUSKLINE_COMPATIBILITY_H
#define TUSKLINE_COMPATIBILITY_H

#include "postgres.h"

#include "access/transam.h"
#include "access/xlog.h"
#if PG_VERSION_NUM >= 150000
#include "access/xlogrecovery.h"
#endif
#if PG_VERSION_NUM >= 130000
#include "access/xlogreader.h"
#include "access/xlogutils.h"
#endif
#include "catalog/pg_control.h"
#include "common/controldata_utils.h"
#include "miscadmin.h"
#if PG_VERSION_NUM >= 130000
#include "postmaster/interrupt.h"
#endif
#include "replication/logical.h"
#if PG_VERSION_NUM < 130000
#include "access/xlogutils.h"
#include "replication/logicalfuncs.h"
#endif
#include "replication/slot.h"
#include "utils/guc.h"

#if PG_VERSION_NUM < 110000 || PG_VERSION_NUM >= 190000
#error "Tuskline's extension is written for PostgreSQL 11 to 18"
#endif

#define HAS_TWO_PHASE (PG_VERSION_NUM >= 140000)
#define HAS_FAILOVER (PG_VERSION_NUM >= 170000)

/* Create a logical slot of the current database that a crash removes, and own it. */
static inline void
compat_create(const char *name, bool two_phase)
{
#if PG_VERSION_NUM >= 170000
	ReplicationSlotCreate(name, true, RS_EPHEMERAL, two_phase, false, false);
#elif HAS_TWO_PHASE
	ReplicationSlotCreate(name, true, RS_EPHEMERAL, two_phase);
#else
	ReplicationSlotCreate(name, true, RS_EPHEMERAL);
#endif
}

/* Acquire a slot, or ERROR at once if another process owns it. An invalid one is refused elsewhere, on all versions. */
static inline void
compat_acquire(const char *name)
{
#if PG_VERSION_NUM >= 180000
	ReplicationSlotAcquire(name, true, false);
#elif PG_VERSION_NUM >= 130000 && PG_VERSION_NUM < 140000
	(void) ReplicationSlotAcquire(name, SAB_Error);
#else
	ReplicationSlotAcquire(name, true);
#endif
}

/* A decoder for the owned slot as the server's own fast advance makes it: without the slot's plugin and its options. */
static inline LogicalDecodingContext *
compat_decoder(void)
{
#if PG_VERSION_NUM >= 130000
	return CreateDecodingContext(InvalidXLogRecPtr, NIL, true,
								 XL_ROUTINE(.page_read = read_local_xlog_page,
											.segment_open = wal_segment_open,
											.segment_close = wal_segment_close),
								 NULL, NULL, NULL);
#else
	return CreateDecodingContext(InvalidXLogRecPtr, NIL, true, logical_read_local_xlog_page, NULL, NULL, NULL);
#endif
}

/* A reader of this server's WAL. */
static inline XLogReaderState *
compat_reader(void)
{
#if PG_VERSION_NUM >= 130000
	return XLogReaderAllocate(wal_segment_size, NULL,
							  XL_ROUTINE(.page_read = read_local_xlog_page,
										 .segment_open = wal_segment_open,
										 .segment_close = wal_segment_close),
							  NULL);
#else
	return XLogReaderAllocate(wal_segment_size, read_local_xlog_page, NULL);
#endif
}

/* Close the file of a reader that an error ends: no transaction owns it. Before 13 a process has one for all readers. */
static inline void
compat_close_segment(XLogReaderState *reader)
{
#if PG_VERSION_NUM >= 130000
	if (reader->seg.ws_file >= 0)
		wal_segment_close(reader);
#endif
}

/* The next record; the first one is that at `from`, which is given once. */
static inline XLogRecord *
compat_read_record(XLogReaderState *reader, XLogRecPtr from, char **problem)
{
#if PG_VERSION_NUM >= 130000
	if (!XLogRecPtrIsInvalid(from))
		XLogBeginRead(reader, from);
	return XLogReadRecord(reader, problem);
#else
	return XLogReadRecord(reader, from, problem);
#endif
}

/*
 * From a callback that finishes a transaction: report progress, and if nothing was sent to the client for half of
 * wal_sender_timeout, send a keepalive and read its reply. The server defers that at the end of a
 * transaction, so end_xact is false during the call. Minor releases of May 2022 added that member to the majors before
 * 15, at the end of the structure: it is written only if the running server has it, too.
 */
static inline void
compat_keep_alive(LogicalDecodingContext *ctx)
{
#if PG_VERSION_NUM >= 150000
	bool		end_xact = ctx->end_xact;

	ctx->end_xact = false;
	OutputPluginUpdateProgress(ctx, false);
	ctx->end_xact = end_xact;
#else
#if PG_VERSION_NUM >= 140000
#define FIRST_WITH_END_XACT 140003
#elif PG_VERSION_NUM >= 130000
#define FIRST_WITH_END_XACT 130007
#elif PG_VERSION_NUM >= 120000
#define FIRST_WITH_END_XACT 120011
#else
#define FIRST_WITH_END_XACT 110016
#endif
#if PG_VERSION_NUM >= FIRST_WITH_END_XACT
	if (atoi(GetConfigOption("server_version_num", false, false)) >= FIRST_WITH_END_XACT)
	{
		bool		end_xact = ctx->end_xact;

		ctx->end_xact = false;
		OutputPluginUpdateProgress(ctx);
		ctx->end_xact = end_xact;
		return;
	}
#endif
	OutputPluginUpdateProgress(ctx);
#endif
}

/*
 * Whether this process's client has disconnected; before 14 only the next exchange with it shows that. Declared here,
 * since the server's own header requires that of GSSAPI, which is not available to extension builds.
 */
#if PG_VERSION_NUM >= 140000
extern bool pq_check_connection(void);
#endif

static inline bool
compat_client_has_gone(void)
{
#if PG_VERSION_NUM >= 140000
	return MyProcPort != NULL && !pq_check_connection();
#else
	return false;
#endif
}

static inline TransactionId
compat_next_xid(void)
{
#if PG_VERSION_NUM >= 140000
	return ReadNextTransactionId();
#else
	return ReadNewTransactionId();
#endif
}

static inline ControlFileData *
compat_control_file(bool *crc_ok)
{
#if PG_VERSION_NUM >= 120000
	return get_controlfile(DataDir, crc_ok);
#else
	return get_controlfile(DataDir, "tuskline", crc_ok);
#endif
}

/* Why the slot can never be used again, in the words of pg_replication_slots; NULL while it can. */
static inline const char *
compat_invalidation(const ReplicationSlotPersistentData *data)
{
#if PG_VERSION_NUM >= 160000
	switch (data->invalidated)
	{
		case RS_INVAL_NONE:
			return NULL;
		case RS_INVAL_WAL_REMOVED:
			return "wal_removed";
		case RS_INVAL_HORIZON:
			return "rows_removed";
		case RS_INVAL_WAL_LEVEL:
			return "wal_level_insufficient";
#if PG_VERSION_NUM >= 180000
		case RS_INVAL_IDLE_TIMEOUT:
			return "idle_timeout";
#endif
	}
	return "unknown";
#elif PG_VERSION_NUM >= 130000
	return XLogRecPtrIsInvalid(data->invalidated_at) ? NULL : "wal_removed";
#else
	return NULL;
#endif
}

/* Whether PostgreSQL's own slot synchronization maintains this slot. */
static inline bool
compat_synced(const ReplicationSlotPersistentData *data)
{
#if PG_VERSION_NUM >= 170000
	return data->synced;
#else
	return false;
#endif
}

/* Whether PostgreSQL itself will synchronize it to standbys, once its server is a primary. */
static inline bool
compat_failover(const ReplicationSlotPersistentData *data)
{
#if PG_VERSION_NUM >= 170000
	return data->failover;
#else
	return false;
#endif
}

static inline void
compat_set_failover(ReplicationSlotPersistentData *data, bool failover)
{
#if PG_VERSION_NUM >= 170000
	data->failover = failover;
#endif
}

static inline bool
compat_two_phase(const ReplicationSlotPersistentData *data)
{
#if HAS_TWO_PHASE
	return data->two_phase;
#else
	return false;
#endif
}

static inline XLogRecPtr
compat_two_phase_at(const ReplicationSlotPersistentData *data)
{
#if HAS_TWO_PHASE
	return data->two_phase_at;
#else
	return InvalidXLogRecPtr;
#endif
}

static inline void
compat_set_two_phase_at(ReplicationSlotPersistentData *data, XLogRecPtr lsn)
{
#if HAS_TWO_PHASE
	data->two_phase_at = lsn;
#endif
}

#endif
