"""The configuration is strict, and says the nearest name for a wrong one."""

from pathlib import Path

import pytest

from walsender_bridge.config import load_config
from walsender_bridge.config.sections import split_address
from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime.tls_files import TlsFiles, split

#: All addresses of a machine; nothing listens there.
EVERYWHERE = ".".join("0000")
GOOD = """
[log]
data_dir = "log"
listen = "127.0.0.1:7400"

[[log_server]]
listen = "127.0.0.1:7401"
data_dir = "/var/lib/tuskline/log-server"

[[source]]
name = "shop"
dsn = "host=/tmp dbname=shop"

[lake]
uri = "lake"
"""


def _load(tmp_path: Path, text: str):
    path = tmp_path / "tuskline.toml"
    path.write_text(text)
    return load_config(path)


def test_good_file_and_its_defaults(tmp_path):
    config = _load(tmp_path, GOOD)
    assert config.source[0].slot_name == "tuskline_shop"
    assert config.source[0].publication_name == "tuskline_shop"
    assert config.log_address == "grpc://127.0.0.1:7400"
    # Relative to the file; absolute ones as they are.
    assert config.log.data_dir == tmp_path / "log"
    assert config.log_server[0].data_dir == Path("/var/lib/tuskline/log-server")
    assert config.lake is not None
    assert config.lake.uri == str(tmp_path / "lake")


def test_a_lake_uri_with_a_scheme_is_left_alone(tmp_path):
    config = _load(tmp_path, GOOD.replace('uri = "lake"', 'uri = "file:///x/lake"'))
    assert config.lake is not None
    assert config.lake.uri == "file:///x/lake"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("data_dir =", "datadir =", "did you mean 'data_dir'"),
        ("[lake]", "[leke]", "did you mean 'lake'"),
        ("dsn =", "dns =", "did you mean 'dsn'"),
        ('uri = "lake"', 'uri = "lake"\nepoch_intervall = 5', "did you mean 'epoch_interval'"),
        ('name = "shop"', 'name = "../etc"', "source.0.name"),
        ('listen = "127.0.0.1:7400"', 'listen = "nowhere"', "log.listen"),
        ('data_dir = "log"', "", "log.data_dir"),
        ("[log]", "[log", "not TOML"),
        ('uri = "lake"', 'uri = "lake"\nepoch_interval = -1', "lake.epoch_interval"),
        ('uri = "lake"', 'uri = "lake"\nepoch_interval = inf', "lake.epoch_interval"),
        (":7400", ":99999", "99999 is not a port"),
        (":7401", ":7400", "log.listen and log_server.0.listen are both 127.0.0.1:7400"),
        ("127.0.0.1:7401", f"{EVERYWHERE}:7400", "log.listen and log_server.0.listen are both"),
        ("[lake]", '[metrics]\nlisten = "127.0.0.1:7401"\n[lake]', "and metrics.listen are both"),
        ('"/var/lib/tuskline/log-server"', '"log"', "log.data_dir and log_server.0.data_dir are"),
        ('uri = "lake"', 'uri = "log"', "lake.uri and log.data_dir are in each other's way"),
        ('uri = "lake"', 'uri = "log/run"', "lake.uri and log.data_dir are in each other's way"),
        ('uri = "lake"', 'uri = "file:///var/lib/tuskline"', "lake.uri and log_server.0.data_dir"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, GOOD.replace(old, new, 1))
    assert message in str(caught.value)
    assert "tuskline.toml" in str(caught.value)


def test_the_certificate_of_the_machine_goes_with_the_address_of_the_log(tmp_path):
    files = (
        'ca = "tls/ca.pem"\ncertificate = "/etc/tuskline/cert.pem"\nkey = "/etc/tuskline/key.pem"'
    )
    config = _load(tmp_path, f"{GOOD}\n[tls]\n{files}\n")
    own = Path("/etc/tuskline")
    # Relative to the file; absolute ones as they are.
    expected = TlsFiles(tmp_path / "tls" / "ca.pem", own / "cert.pem", own / "key.pem")
    assert config.tls_files == expected
    assert split(config.log_address) == ("grpc+tls://127.0.0.1:7400", expected)
    with pytest.raises(ConfigError, match=r"tls\.key' is missing"):
        _load(tmp_path, f"{GOOD}\n[tls]\n{files.rpartition(chr(10))[0]}\n")


@pytest.mark.parametrize("host", [EVERYWHERE, "[::0]", "10.1.2.3", "[2001:db8::1]"])
@pytest.mark.parametrize(("port", "key"), [(7400, "log.listen"), (7401, "log_server.0.listen")])
def test_a_port_of_the_log_that_others_could_reach_needs_tls(tmp_path, host, port, key):
    text = GOOD.replace(f"127.0.0.1:{port}", f"{host}:{port}")
    with pytest.raises(ConfigError, match=f"{key}: other machines could reach this") as caught:
        _load(tmp_path, text)
    assert "[tls]" in caught.value.repair
    _load(tmp_path, f'{text}\n[tls]\nca = "a"\ncertificate = "b"\nkey = "c"\n')


def test_a_gate_is_of_all_sources_or_of_one(tmp_path):
    text = (
        GOOD
        + """
[gate]
candidates = ["a", "b"]
quorum = 1
"""
    )
    own = '\n[source.gate]\ncandidates = ["c"]\non_missing = "degrade"\n'
    second = '\n[[source]]\nname = "other"\ndsn = "host=/tmp dbname=other"\n' + own
    config = _load(tmp_path, text.replace("\n[lake]", second + "\n[lake]"))
    first, other = (config.gate_of(source) for source in config.source)
    assert (first.candidates, first.quorum, first.on_missing) == (("a", "b"), 1, "block")
    assert (other.candidates, other.quorum, other.on_missing) == (("c",), None, "degrade")
    # There are no safekeepers to wait for.
    assert not first.safekeepers
    assert config.gate_record(config.source[1]) == tmp_path / "log" / "gate" / "other.jsonl"


def test_the_safekeepers_count_for_the_sources_of_their_server(tmp_path):
    second = '\n[[source]]\nname = "{}"\ndsn = "{}"\n'
    more = second.format("same", "dbname=other host=/tmp") + second.format("far", "host=far")
    text = GOOD.replace("\n[lake]", more + "\n[safekeepers]\nlocal = 3\n\n[lake]")
    config = _load(tmp_path, text)
    assert [config.gate_of(source).safekeepers for source in config.source] == [True, True, False]
    config = _load(tmp_path, text + "\n[gate]\nsafekeepers = false\n")
    assert not any(config.gate_of(source).safekeepers for source in config.source)


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ('candidates = ["a", "a"]', "gate: a is listed twice"),
        (
            'candidates = ["a"]\nquorum = 2',
            "gate: quorum is 2, more than the number of candidates (1)",
        ),
        ('candidates = ["tuskline_safekeepers"]', "the safekeepers' own slot"),
        ('candidates = ["A-1"]', "gate.candidates.0"),
        ("candidate = 5", "did you mean 'candidates'"),
    ],
)
def test_a_wrong_gate_is_named(tmp_path, gate, message):
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, f"{GOOD}\n[safekeepers]\nlocal = 3\n[gate]\n{gate}\n")
    assert message in str(caught.value)


def test_of_several_hosts_the_one_is_meant_that_takes_writes(tmp_path):
    config = _load(tmp_path, GOOD.replace("host=/tmp", "host=a,b"))
    assert "target_session_attrs=read-write" in config.source[0].dsn
    chosen = "host=a,b target_session_attrs=any"
    assert chosen in _load(tmp_path, GOOD.replace("host=/tmp", chosen)).source[0].dsn


def test_the_environment_wins_over_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TUSKLINE_LAKE__EPOCH_INTERVAL", "7.5")
    config = _load(tmp_path, GOOD)
    assert config.lake is not None
    assert config.lake.epoch_interval == 7.5
    assert config.lake.uri.endswith("/lake")


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="could not read the configuration"):
        load_config(tmp_path / "none.toml")


def test_two_sources_of_one_name(tmp_path):
    again = '\n[[source]]\nname = "shop"\ndsn = "dbname=other"\n'
    with pytest.raises(ConfigError, match="two sources"):
        _load(tmp_path, GOOD + again)


def test_no_password_in_errors(tmp_path):
    secret = GOOD.replace("dbname=shop", "dbname=shop password=s3cr3t-planted")
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, secret + "\n[[source]]\nname = 5\ndsn = 'password=s3cr3t-planted'\n")
    assert "s3cr3t" not in str(caught.value)


def test_what_does_not_fit_has_a_policy_by_table(tmp_path):
    text = (
        f'{GOOD}[lake.on_unrepresentable_value]\ndefault = "quarantine"\n"shop.public.a" = "fail"\n'
    )
    config = _load(tmp_path, text)
    assert config.lake is not None
    assert config.lake.on_unrepresentable_value == {
        "default": "quarantine",
        "shop.public.a": "fail",
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('default = "skip"', r"lake\.on_unrepresentable_value\.default: input should be 'fail' or"),
        ('defualt = "fail"', r"'defualt' is not a table .*\n.*did you mean 'default'"),
        ('"shopp.public.a" = "fail"', r"did you mean 'shop\.public\.a'"),
        ('"shop.public.b" = "fail"', r"did you mean 'shop\.public\.a'"),
        ('"public.a" = "fail"', r"did you mean 'shop\.public\.a'"),
    ],
)
def test_a_policy_for_no_table_is_named(tmp_path, line, message):
    text = GOOD.replace('name = "shop"', 'name = "shop"\ntables = ["public.a"]')
    with pytest.raises(ConfigError, match=message):
        _load(tmp_path, f"{text}[lake.on_unrepresentable_value]\n{line}\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            'default = "positions"',
            r"lake\.deletes\.default: input should be 'vectors', 'position-deletes' or",
        ),
        (
            '"shop.public.b" = "vectors"',
            r"lake\.deletes: .* is not a table .*\n.*'shop\.public\.a'",
        ),
    ],
)
def test_deletes_of_no_table_are_named(tmp_path, line, message):
    text = GOOD.replace('name = "shop"', 'name = "shop"\ntables = ["public.a"]')
    with pytest.raises(ConfigError, match=message):
        _load(tmp_path, f"{text}[lake.deletes]\n{line}\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('pattern = "orders"', "'orders' is not a table pattern"),
        ('pattern = "!public.a"', "must not begin with"),
        ('pattern = "public.*"\npartition = ["week(a)"]', "week is not a transform"),
        ('pattern = "public.*"\noptions = { "format-version" = "2" }', r"\[lake.deletes\]"),
        ('pattern = "public.*"\nsource = "shpo"', "no source 'shpo'\n.*'shop'"),
        ('pattern = "public.*"\npartitions = []', "partitions'\n.*'partition'"),
        ('pattern = "public.*"\nmask = { email = "md5" }', "mask of email: 'md5' is not \"hash\""),
        ('pattern = "public.*"\nmask = { a = "drop", A = "hash" }', "column a has two masks"),
        ('pattern = "public.*"\nmask = { "a b" = "drop" }', "'a b' is not a column"),
        (
            'pattern = "public.*"\nrows = "a = 1"\nmode = "history"',
            'rows cannot be combined with mode = "history"',
        ),
        (
            'pattern = "public.*"\nrows = "a = 1"\nmode = "soft_delete"',
            'rows cannot be combined with mode = "soft_delete"',
        ),
        (
            'pattern = "public.*"\nrows = "a = 1"\nfeed = true',
            "rows cannot be combined with feed",
        ),
        ('pattern = "public.*"\nmode = "deleted"', 'mode = "deleted" is none of "current"'),
        ('pattern = "public.a"\nname = "a-b"', "'a-b' is not a name of tables in the lake"),
        ('pattern = "public.*"\nname = "x.y"', r"matches several tables: write \{table\} in it"),
    ],
)
def test_a_layout_that_no_table_can_have_is_named(tmp_path, line, message):
    with pytest.raises(ConfigError, match=rf"lake\.tables.*{message}"):
        _load(tmp_path, f"{GOOD}[[lake.tables]]\n{line}\n")


ONE = '[[lake.tables]]\npattern = "public.a"\nname = "sales.x"\n'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('[[lake.tables]]\npattern = "hr.b"\nname = "sales.x"', "public.a and hr.b would both be sales.x"),
        ('[[lake.tables]]\npattern = "sales.b"\nname = "x"', "public.a and sales.b would both be sales.x"),
        ('[[lake.tables]]\npattern = "hr.b"\nsource = "shop"\nname = "sales.x"', "would both be"),
        ('[[lake.view]]\nname = "sales.x"\nsql = "SELECT id FROM b"', "public.a and a view would both be sales.x"),
        # One table; and a section that never applies.
        ('[[lake.tables]]\npattern = "public.a"\nname = "sales.x"', ""),
        ('[[lake.view]]\nname = "sales.y"\nsql = "SELECT id FROM b"', ""),
    ],
)  # fmt: skip
def test_two_tables_of_one_name_in_the_lake_are_named(tmp_path, lines, message):
    text = f"{GOOD}{ONE}{lines}\n"
    if not message:
        assert _load(tmp_path, text).lake.tables[0].rule.name == "sales.x"
        return
    with pytest.raises(ConfigError, match=rf"lake.*{message} in the lake|lake.*{message}"):
        _load(tmp_path, text)


def test_tables_of_two_sources_may_have_one_name_in_the_lake(tmp_path):
    other = '[[source]]\nname = "hr"\ndsn = "dbname=hr"\nslot = "hr"\n'
    sections = ONE.replace("pattern", 'source = "shop"\npattern') + (
        '[[lake.tables]]\nsource = "hr"\npattern = "public.b"\nname = "sales.x"\n'
    )
    assert len(_load(tmp_path, GOOD + other + sections).lake.tables) == 2


def test_without_safekeepers_nothing_is_hosted_and_no_server_waits(tmp_path):
    config = _load(tmp_path, GOOD)
    assert config.quorum_source is None
    assert config.safekeepers.proposed_to == ()


def test_local_safekeepers_have_ports_in_a_row(tmp_path):
    config = _load(tmp_path, f'{GOOD}[safekeepers]\nlocal = 3\nlisten = "[::1]:7500"\n')
    section = config.safekeepers
    assert section.proposed_to == ("[::1]:7500", "[::1]:7501", "[::1]:7502")
    assert section.wal_addresses == ("127.0.0.1:7420", "127.0.0.1:7421", "127.0.0.1:7422")
    assert split_address(section.proposed_to[1]) == ("::1", 7501)
    assert config.quorum_source is config.source[0]


def test_safekeepers_elsewhere_are_proposed_to_where_they_are(tmp_path):
    text = f'{GOOD}[safekeepers]\nlocal = 1\naddresses = ["a:1", "b:1", "c:1"]\nusers = "users"\n'
    section = _load(tmp_path, text).safekeepers
    assert section.proposed_to == ("a:1", "b:1", "c:1")
    assert section.hosted_addresses == ("127.0.0.1:7410",)
    assert section.users == tmp_path / "users"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("local = 2", "safekeepers.local"),
        ('addresses = ["a:1", "a:1", "b:1"]', "safekeepers.addresses: a:1 is listed twice"),
        ('addresses = ["a:1", "b:1"]', "worse than one"),
        ('addresses = ["a"]', r"safekeepers.addresses.0: 'a' is not of the form host:port"),
        ('adresses = ["a:1"]', "did you mean 'addresses'"),
        ('local = 1\nsource = "shopp"', "did you mean 'shop'"),
        ('local = 3\nlisten = "127.0.0.1:7399"', "7400 is the address of another part"),
        ('local = 3\nlisten = "127.0.0.1:7418"', "overlap"),
        ('listen = "127.0.0.1:65535"', "safekeepers.listen"),
        ('application_name = "*"', "safekeepers.application_name"),
        ("max_queue_bytes = 1", "safekeepers.max_queue_bytes"),
        ('tls_cert = "x"', "belong together"),
    ],
)
def test_a_wrong_quorum_is_named(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        _load(tmp_path, f"{GOOD}[safekeepers]\n{lines}\n")


SLOTS = """
[slots]
names = ["app"]

[slots.candidates.near]
dsn = "host=near"
slot = "near"
"""


def test_slots_and_their_defaults(tmp_path):
    config = _load(tmp_path, GOOD + SLOTS)
    assert config.slots is not None
    assert config.slots.candidates["near"].slot == "near"
    assert config.slots.poll == 1.0
    # The primary is the source's server, unless it is named.
    assert config.slots_dsn == "host=/tmp dbname=shop"
    named = SLOTS.replace("[slots]", '[slots]\ndsn = "host=other"')
    assert _load(tmp_path, GOOD + named).slots_dsn == "host=other"
    assert _load(tmp_path, GOOD).slots is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("names =", "nams =", "did you mean 'names'"),
        ("slot =", "slots =", "did you mean 'slot'"),
        ('slot = "near"', 'slot = "Near"', "slots.candidates.near.slot"),
        ('slot = "near"', "", "'slots.candidates.near.slot' is missing"),
        ("[slots]", '[slots]\nsource = "shap"', "there is no source 'shap'"),
        ("[slots]", "[slots]\npoll = 0", "slots.poll"),
        (
            "[slots.candidates.near]",
            '[slots.candidates.far]\ndsn = ""\nslot = "near"\n[slots.candidates.near]',
            "a physical slot of its own",
        ),
    ],
)
def test_wrong_slots_are_named(tmp_path, old, new, message):
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, GOOD + SLOTS.replace(old, new, 1))
    assert message in str(caught.value)


def test_slots_without_a_candidate_are_no_slots(tmp_path):
    with pytest.raises(ConfigError, match=r"slots.candidates"):
        _load(tmp_path, GOOD + "[slots]\ncandidates = {}\n")


ETCD = GOOD.replace(
    "[[log_server]]",
    """store = "etcd"
repositories = ["127.0.0.1:7400", "127.0.0.1:7500"]

[etcd]
endpoints = ["127.0.0.1:2379"]

[[log_server]]""",
)


def test_the_repositories_of_a_log_in_etcd_are_one_address(tmp_path):
    config = _load(tmp_path, ETCD)
    assert config.log_address == "grpc://127.0.0.1:7400,127.0.0.1:7500"
    assert config.etcd is not None
    assert config.etcd.prefix == "/tuskline/"
    assert config.etcd.tls_files is None
    files = 'ca = "a/ca.pem"\ncertificate = "a/cert.pem"\nkey = "a/key.pem"\n'
    config = _load(tmp_path, ETCD.replace("[etcd]\n", "[etcd]\n" + files))
    assert config.etcd is not None
    assert config.etcd.tls_files is not None
    assert config.etcd.tls_files.key == tmp_path / "a" / "key.pem"
    far = ETCD.replace("127.0.0.1:2379", "10.0.0.1:2379").replace("[etcd]\n", "[etcd]\n" + files)
    assert _load(tmp_path, far).etcd is not None
    assert _load(tmp_path, ETCD.replace("127.0.0.1:2379", "[::1]:2379")).etcd is not None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('store = "etcd"', "", "belong together"),
        ('[etcd]\nendpoints = ["127.0.0.1:2379"]', "", "belong together"),
        (
            '"127.0.0.1:7400", ',
            '"127.0.0.1:7500", ',
            "log.repositories: 127.0.0.1:7500 is listed twice",
        ),
        ('"127.0.0.1:2379"', "", "endpoints"),
        ("[etcd]", '[etcd]\nca = "ca.pem"', "belong together"),
        ("127.0.0.1:2379", "10.0.0.1:2379", "etcd.endpoints: other machines could reach"),
        ("127.0.0.1:2379", "etcd-1.example:2379", "etcd.endpoints: other machines could reach"),
        ("[etcd]", '[etcd]\nprefix = "tuskline"', "prefix"),
        ("[etcd]", "[etcd]\nlease = 1", "lease"),
        ("[etcd]", "[etcd]\nendpoint = 1", "did you mean 'endpoints'"),
    ],
)
def test_etcd_and_its_store_fit_together(tmp_path, old, new, message):
    with pytest.raises(ConfigError) as raised:
        _load(tmp_path, ETCD.replace(old, new))
    assert message in str(raised.value)


def test_several_repositories_need_etcd(tmp_path):
    text = GOOD.replace("[[log_server]]", 'repositories = ["127.0.0.1:7400"]\n[[log_server]]')
    with pytest.raises(ConfigError, match="store that all of them reach"):
        _load(tmp_path, text)
