"""Where a session's jars go: the class path of a local driver, or `spark.jars` for executors in other processes."""

import pytest

from spark_consumers.spark.session import own_jvm_settings

CHOSEN = {"spark.jars": "/jars/iceberg.jar,/jars/delta.jar", "spark.ui.enabled": "false"}
CLASS_PATH = "spark.driver.extraClassPath"


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*,4]"])
def test_a_local_driver_has_the_jars_on_its_class_path(master):
    merged = own_jvm_settings(master, CHOSEN, {"spark.ui.enabled": "true"})
    assert merged == {CLASS_PATH: "/jars/iceberg.jar:/jars/delta.jar", "spark.ui.enabled": "true"}


@pytest.mark.parametrize("master", ["local-cluster[1,2,1024]", "spark://h:7077", "yarn"])
def test_executors_in_other_processes_get_the_jars(master):
    assert own_jvm_settings(master, CHOSEN, {}) == CHOSEN


def test_a_class_path_of_the_caller_s_stays_before_the_jars():
    merged = own_jvm_settings("local[2]", CHOSEN, {CLASS_PATH: "/mine.jar"})
    assert merged[CLASS_PATH] == "/mine.jar:/jars/iceberg.jar:/jars/delta.jar"


def test_jars_of_the_caller_s_replace_ours_as_every_setting_does():
    conf = {"spark.jars": "/other.jar"}
    assert own_jvm_settings("local[2]", CHOSEN, conf)["spark.jars"] == "/other.jar"
    assert CLASS_PATH not in own_jvm_settings("local[2]", CHOSEN, conf)
