/*
 * An output plugin for tests that reads a user_catalog_table while it decodes, as replication sets are read: for each
 * changed row it says how many rows public.chosen had then.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#if PG_VERSION_NUM >= 120000
#include "access/table.h"
#else
#define table_open heap_open
#define table_close heap_close
#endif
#include "catalog/namespace.h"
#include "fmgr.h"
#include "replication/logical.h"
#include "replication/output_plugin.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

PG_MODULE_MAGIC;

extern PGDLLEXPORT void _PG_output_plugin_init(OutputPluginCallbacks *callbacks);

static void
start(LogicalDecodingContext *ctx, OutputPluginOptions *options, bool is_init)
{
	options->output_type = OUTPUT_PLUGIN_TEXTUAL_OUTPUT;
}

static void
begin(LogicalDecodingContext *ctx, ReorderBufferTXN *txn)
{
}

static void
commit(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, XLogRecPtr commit_lsn)
{
}

static int
count_chosen(void)
{
	Oid			table = get_relname_relid("chosen", get_namespace_oid("public", false));
	Relation	relation = table_open(table, AccessShareLock);
	SysScanDesc scan = systable_beginscan(relation, InvalidOid, false, NULL, 0, NULL);
	int			count = 0;

	while (HeapTupleIsValid(systable_getnext(scan)))
		count++;
	systable_endscan(scan);
	table_close(relation, AccessShareLock);
	return count;
}

static void
change(LogicalDecodingContext *ctx, ReorderBufferTXN *txn, Relation relation, ReorderBufferChange *change)
{
	OutputPluginPrepareWrite(ctx, true);
	appendStringInfo(ctx->out, "%s: %d chosen", RelationGetRelationName(relation), count_chosen());
	OutputPluginWrite(ctx, true);
}

void
_PG_output_plugin_init(OutputPluginCallbacks *callbacks)
{
	callbacks->startup_cb = start;
	callbacks->begin_cb = begin;
	callbacks->change_cb = change;
	callbacks->commit_cb = commit;
}
