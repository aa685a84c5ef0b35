SELECT tuskline.report_driver(%(lake)s, %(stream)s, %(publication)s, %(timelines)s::jsonb);
