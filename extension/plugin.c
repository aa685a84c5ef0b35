/*
 * Which output plugins a copy may have: those that this server accepts for its own slots, and can load. With any
 * other the slot would be useless after a promotion.
 */
#include "tuskline.h"

#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/varlena.h"

static void
explain_plugin(void *plugin)
{
	errcontext("looking for the output plugin \"%s\" of the slot on the primary", (char *) plugin);
	errhint("Install the plugin on this standby.");
}

/*
 * Refuse a plugin that this server would not accept from another client. Minor releases of 2026 accept only those that
 * a setting names, so that a role that may create slots cannot load any library; older ones have no such setting.
 */
static void
require_listed(const char *plugin)
{
	const char *setting = GetConfigOption("output_plugin_libraries", true, false);
	bool		is_listed = setting == NULL;
	List	   *names;
	ListCell   *cell;
	char	   *text;

	if (is_listed)
		return;
	text = pstrdup(setting);
	if (SplitIdentifierString(text, ',', &names))
	{
		foreach(cell, names)
			is_listed |= strcmp((const char *) lfirst(cell), plugin) == 0;
		list_free(names);
	}
	if (!is_listed)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("library \"%s\" may not be used as an output plugin on this standby", plugin),
				 errdetail("Parameter \"output_plugin_libraries\" is \"%s\".", setting),
				 errhint("If the library is safe, add it to that parameter and reload the configuration.")));
	pfree(text);
}

/* Refuse a plugin that cannot be loaded here: the slot would be useless after a promotion. */
void
require_plugin(char *plugin)
{
	ErrorContextCallback explanation = {.callback = explain_plugin, .arg = plugin};

	if (plugin[0] == '\0' || first_dir_separator(plugin) != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_NAME),
				 errmsg("\"%s\" is not the name of an output plugin", plugin),
				 errdetail("The name must not contain a directory."),
				 errhint("Specify the value of the slot on the primary.")));
	require_listed(plugin);
	explanation.previous = error_context_stack;
	error_context_stack = &explanation;
	(void) load_external_function(plugin, "_PG_output_plugin_init", true, NULL);
	error_context_stack = explanation.previous;
}
