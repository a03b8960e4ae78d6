"""How stores are reached: the configured endpoint, credentials and their names in errors, public buckets and payers."""

import os
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cache.reader import TokenCache
from pipeline.errors import UsageError
from pipeline.inputs.manifest import convert_given_videos
from pipeline.storage.hub import HubFiles
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at
from tests.builders.manifests import read_manifest
from tests.builders.stores import KEY, REGION, SECRET, TOKEN, answering, reach_hub

KEYS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
PROFILE = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"


@pytest.fixture
def server(server, monkeypatch, tmp_path):
    """A store with a public object, of which this process knows the region alone; ``tmp_path`` has the AWS files."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "BOTO"))]:
        monkeypatch.delenv(name)
    files = {"AWS_CONFIG_FILE": tmp_path / "config", "AWS_SHARED_CREDENTIALS_FILE": tmp_path / "credentials"}
    for path in files.values():
        path.touch()
    known = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": REGION, "HOME": tmp_path, **files}
    set_variables(monkeypatch, {name: str(value) for name, value in known.items()})
    server.client.put_object(Bucket=server.bucket, Key="v/a.mp4", Body=b"video", ACL="public-read")
    server.client.put_bucket_acl(Bucket=server.bucket, ACL="public-read")
    server.requests.clear()
    return server


@pytest.fixture
def refuses(server):
    """Asserts that something is refused, for a reason, without a secret; returns the error."""

    def refuses(why, ask, *arguments, kind=OSError):
        with pytest.raises(kind, match=why) as error:
            ask(*arguments)
        assert not any(part in str(error.value) for part in (KEY[:8], KEY[-6:], SECRET[:8], TOKEN, server.url))
        return error.value

    return refuses


@pytest.fixture
def sent(server, monkeypatch):
    """The headers of each request, of all that the server gets."""
    headers, app = [], server._app

    def record(environ, start):
        headers.append({name.removeprefix("HTTP_"): value for name, value in environ.items() if name[:5] == "HTTP_"})
        return app(environ, start)

    monkeypatch.setattr(server, "_app", record)
    return headers


def set_variables(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def reaches(server, environ, monkeypatch):
    set_variables(monkeypatch, {"AWS_ENDPOINT_URL": server.url, **environ})
    return Objects.from_environment()


REFUSALS = [
    ("SignatureDoesNotMatch", 403, "are wrong"),
    ("InvalidToken", 400, "are wrong"),
    ("AuthorizationHeaderMalformed", 400, "are wrong, or not those of this store or region"),
    ("ExpiredToken", 400, "have expired: rerun the command with new credentials"),
    ("AccessDenied", 403, "do not allow this"),
    ("Unheard", 401, "do not allow this"),
    ("RequestTimeTooSkewed", 403, "are refused because the clock of this machine is wrong"),
]


def test_a_refusal_says_where_the_credentials_came_from(server, refuses, monkeypatch, tmp_path):
    environment = reaches(server, KEYS, monkeypatch)
    for name in KEYS:
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(f"[work]\n{PROFILE}")
    (tmp_path / "config").write_text(f"[profile other]\n{PROFILE}")
    objects = {"the environment (AWS_ACCESS_KEY_ID)": pickle.loads(pickle.dumps(environment))}  # noqa: S301
    for profile, file in (("work", "credentials"), ("other", "config")):
        monkeypatch.setenv("AWS_PROFILE", profile)
        objects[f"profile {profile} of {tmp_path / file}"] = Objects.from_environment()
    for code, status, why in REFUSALS:
        server.fail("GET", "v/a.mp4", status, code)
        for source, client in objects.items():
            said = str(refuses(code, client.read, server.uri("v/a.mp4")))
            assert f"the credentials from {source} {why}" in said
    server.fail("PUT", "v/a.mp4", 403)
    for source, client in objects.items():
        assert source in str(refuses("AccessDenied", store_at(server.uri(), client).put, "v/a.mp4", b"x"))


def test_a_refusal_without_a_text_and_one_that_is_not_about_credentials(server, refuses, monkeypatch):
    server.fail("HEAD", "c/cache.json", 403)
    server.fail("GET", "c/cache.json", 403, "")
    objects = reaches(server, KEYS, monkeypatch)
    for ask in (objects.info, objects.exists, lambda uri: TokenCache(uri.rpartition("/")[0])):
        why = r"credentials from the environment \(AWS_ACCESS_KEY_ID\)"
        refuses(why, ask, server.uri("c/cache.json"), kind=(OSError, UsageError))
    for code, status in (("InvalidObjectState", 403), ("NoSuchKey", 404)):
        server.fail("GET", "v/a.mp4", status, code)
        assert "credentials" not in str(refuses(code, objects.read, server.uri("v/a.mp4")))


NONE = "no credentials in the environment"
ROLE = {"AWS_ROLE_ARN": "arn:aws:iam::1:role/r"}
SSO = "[default]\nsso_start_url = https://x\nsso_region = r\nsso_account_id = 1\nsso_role_name = n"
PROCESS = "[default]\ncredential_process ="
CONTAINER = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:9/x"}
#: What is configured, as files and variables, and what an error says.
UNUSABLE = {
    "key": ({}, {"AWS_ACCESS_KEY_ID": KEY}, "credentials in the environment are partial: aws_secret_access_key"),
    "secret": ({}, {"AWS_SECRET_ACCESS_KEY": SECRET}, "environment are partial: aws_access_key_id is missing"),
    "token": ({}, {"AWS_SESSION_TOKEN": TOKEN}, NONE),
    "role": ({}, ROLE, NONE),
    "web": ({}, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/no", **ROLE}, "cannot be read from /no"),
    "container": ({}, CONTAINER, "cannot be had from container-role"),
    "file-key": ({"credentials": f"[default]\naws_access_key_id = {KEY}\n"}, {}, "credentials in profile default of"),
    "file-secret": ({"credentials": f"[default]\naws_secret_access_key = {SECRET}\n"}, {}, NONE),
    "other-profile": ({"config": f"[profile work]\n{PROFILE}"}, {}, f"{NONE}, in profile def"),
    "no-profile": ({}, {"AWS_PROFILE": "gone"}, r"AWS_PROFILE names a profile \(gone\) that the files of credentials"),
    "process": ({"config": f"{PROCESS} /no/x\n"}, {}, "credentials cannot be read from /no/x"),
    "failing-process": ({"config": f"{PROCESS} false\n"}, {}, "cannot be had from custom-process"),
    "no-json": ({"config": f"{PROCESS} echo x\n"}, {}, "credentials cannot be had from"),
    "default-profile": ({}, {"AWS_DEFAULT_PROFILE": "gone"}, r"AWS_DEFAULT_PROFILE names a profile \(gone\)"),
    "missing-file": ({}, {"AWS_CONFIG_FILE": "/no/x"}, "credentials cannot be read from /no/x"),
    "sso": ({"config": SSO}, {}, "have expired: run aws sso login"),
    "broken": ({"config": "[default\n"}, {}, "the files of credentials cannot be used"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_credentials_that_are_partial_or_out_of_reach_never_make_a_read_unsigned(
    server, refuses, monkeypatch, tmp_path, case
):
    monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0)
    files, environ, why = UNUSABLE[case]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    objects = reaches(server, environ, monkeypatch)
    error = refuses(why, objects.read, server.uri("v/a.mp4"))
    assert not server.requests and not isinstance(error, FileNotFoundError)  # of the object


@pytest.mark.parametrize(("status", "unsigned"), [(404, True), (403, True), (500, False), (200, False), (None, False)])
def test_a_metadata_service_that_fails_counts_as_credentials(server, refuses, monkeypatch, status, unsigned):
    """404: there is no role. 200: there is one, and its credentials are no JSON. None: a configured service is away."""
    size = [("Content-Length", "4")]
    with answering(lambda ask: (200 if ask.command == "PUT" and status != 500 else status, size, b"role")) as url:
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url if status else "http://127.0.0.1:9")
        objects = reaches(server, {}, monkeypatch)
        if unsigned:
            assert objects.read(server.uri("v/a.mp4")) == b"video"
        else:
            refuses(NONE, objects.read, server.uri("v/a.mp4"))


def test_a_public_bucket_is_read_without_keys_and_only_read(server, refuses, monkeypatch, sent, caplog):
    objects = reaches(server, {}, monkeypatch)
    (info,) = objects.list(server.uri("v/"))
    of_worker = pickle.loads(pickle.dumps(objects))  # noqa: S301
    assert of_worker.read(info.uri) == b"video" and of_worker.info(info.uri) == info
    assert of_worker.read_slice(info.uri, -2).data == b"eo"
    assert not any("AUTHORIZATION" in headers for headers in sent) and len(sent) == 4
    assert [record.message[:44] for record in caplog.records if "credentials" in record.message] == [
        "note: no AWS credentials are configured. Sou"
    ]
    server.fail("GET", "private/a.mp4", 403)
    why = "no credentials are configured, and a request without them is refused"
    refuses(why, objects.read, server.uri("private/a.mp4"), kind=PermissionError)
    sent.clear()
    for store in (store_at(server.uri("c"), objects), store_at(server.uri("v"), of_worker), store_at(server.uri("v"))):
        for ask, *arguments in ((store.put, "a", b"x"), (store.read, "a.mp4"), (store.list_files, "")):
            refuses(f"{NONE}, in profile default of", ask, *arguments)
    assert not sent


def test_a_node_with_credentials_signs_what_the_driver_could_not(server, monkeypatch, sent):
    of_worker = pickle.dumps(reaches(server, {}, monkeypatch))
    decided = Objects.from_environment()
    decided.settle_access(server.uri())
    set_variables(monkeypatch, KEYS)
    for data in (of_worker, pickle.dumps(decided)):
        assert pickle.loads(data).read(server.uri("v/a.mp4")) == b"video"  # noqa: S301
    assert all("AUTHORIZATION" in headers for headers in sent) and len(sent) == 2


def test_a_requester_who_has_credentials_pays_for_reads_of_sources_alone(server, refuses, monkeypatch, sent):
    reaches(server, {}, monkeypatch)
    refuses(NONE, Objects.from_environment(requester_pays=True).read, server.uri("v/a.mp4"))
    assert not sent
    set_variables(monkeypatch, KEYS)
    objects = Objects.from_environment(requester_pays=True)
    (info,) = objects.list(server.uri("v/"))
    of_worker = pickle.loads(pickle.dumps(objects))  # noqa: S301
    assert of_worker.read(info.uri) == b"video" and of_worker.with_short_timeouts().info(info.uri).size == 5
    assert [headers.get("X_AMZ_REQUEST_PAYER") for headers in sent] == ["requester"] * 3
    assert all("x-amz-request-payer" in headers["AUTHORIZATION"] for headers in sent)  # signed
    sent.clear()
    for store in (store_at(server.uri("c"), objects), store_at(server.uri("c"), of_worker)):
        store.put("a", b"x")
        assert store.read("a") == b"x" and store.list_files("") and store.exists("a")
    assert len(sent) == 8 and not any("X_AMZ_REQUEST_PAYER" in headers for headers in sent)


AWAY = "[default]\nendpoint_url = http://127.0.0.1:9\n"
#: How an endpoint is configured: the file, and variables.
ENDPOINTS = {
    "profile": ("[default]\nendpoint_url = URL\n", {}),
    "variable-of-s3": ("", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ENDPOINT_URL_S3": "URL"}),
    "named-profile": ("[profile minio]\nendpoint_url = URL\nregion = r\n", {"AWS_PROFILE": "minio"}),
    "services": (f"{AWAY}services = mine\n[services mine]\ns3 =\n  endpoint_url = URL\n", {}),
    "variable-first": (AWAY, {"AWS_ENDPOINT_URL": "URL"}),
}


@pytest.mark.parametrize("case", ENDPOINTS)
def test_an_endpoint_has_the_same_settings_wherever_it_is_configured(
    server, refuses, monkeypatch, tmp_path, sent, case
):
    text, environ = ENDPOINTS[case]
    (tmp_path / "config").write_text(text.replace("URL", server.url))
    (tmp_path / "credentials").write_text(f"[{environ.get('AWS_PROFILE', 'default')}]\n{PROFILE}")
    set_variables(monkeypatch, {name: value.replace("URL", server.url) for name, value in environ.items()})
    store = store_at(server.uri("c"))
    store.put("a", b"x")
    assert [headers for headers in sent if any("CHECKSUM" in name for name in headers)] == []
    data = pickle.dumps(store)  # a worker may have no such file and no such variable
    (tmp_path / "config").unlink()
    for name in environ:
        monkeypatch.delenv(name)
    of_worker = pickle.loads(data)  # noqa: S301
    of_worker.put("b", b"x")
    assert of_worker.read("a") == b"x" and not any("CHECKSUM" in name for headers in sent for name in headers)
    assert {request.path.split("/")[1] for request in server.requests} == {server.bucket}  # by path
    server.fail("GET", "c/a", 400, f"Bad-{server.url}/x-{SECRET}")
    refuses("Bad", of_worker.read, "a")


def test_a_driver_without_an_endpoint_decides_for_nodes_that_have_one(server, monkeypatch):
    set_variables(monkeypatch, KEYS)
    objects = Objects.from_environment()
    objects.settle_access(server.uri())
    data = pickle.dumps(objects)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    assert "amazonaws.com" in pickle.loads(data)._get_client().meta.endpoint_url  # noqa: S301


@pytest.mark.parametrize("text", ["", "[default]\nignore_configured_endpoint_urls = true\nendpoint_url = URL\n"])
def test_configured_endpoints_can_be_ignored_but_not_the_flag(server, monkeypatch, tmp_path, text):
    (tmp_path / "config").write_text(text.replace("URL", server.url))
    if not text:
        monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    objects = reaches(server, KEYS, monkeypatch)
    objects.settle_access(server.uri())
    assert "endpoint_url" not in objects._settings and "amazonaws.com" in objects._get_client().meta.endpoint_url
    assert Objects.from_environment(server.url).read(server.uri("v/a.mp4")) == b"video"


def test_the_driver_decides_for_the_objects_that_a_local_manifest_names(server, monkeypatch, tmp_path, caplog):
    """No request of the driver's own reaches the store before its workers' do."""
    table = pa.table({"video_id": ["a"], "uri": [server.uri("v/a.mp4")]})
    pq.write_table(table, tmp_path / "m.parquet")
    (tmp_path / "config").write_text(f"[default]\nendpoint_url = {server.url}\n")
    for read in (
        lambda objects: read_manifest(str(tmp_path / "m.parquet"), [server.uri()], objects),
        lambda objects: convert_given_videos(table, [server.uri()], objects),
    ):
        objects = Objects.from_environment()
        read(objects)
        assert not server.requests and (objects._unsigned, objects._settings["endpoint_url"]) == (True, server.url)
    monkeypatch.setenv("AWS_PROFILE", "gone")
    with pytest.raises(UsageError, match="names a profile"):
        read(Objects.from_environment())


def test_azure_names_its_credentials(monkeypatch):
    headers = [("x-ms-error-code", "AuthenticationFailed"), ("Content-Length", "0")]
    with answering(lambda ask: (403, headers, b"")) as url:
        settings = f"AccountName=account;AccountKey=c2VjcmV0;BlobEndpoint={url}/account"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", settings)
        store = store_at("az://box/c")
        for ask, *arguments in ((store.read, "a"), (store.put, "a", b"x"), (store.list_files, "")):
            with pytest.raises(PermissionError, match=r"the environment \(AZURE_STORAGE_CON") as error:
                ask(*arguments)
            assert "c2VjcmV0" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "code", "token", "kind", "why"),
    [
        (401, "", "hf_abcdef", PermissionError, "the token of HF_TOKEN"),
        (401, "RepoNotFound", "hf_abcdef", FileNotFoundError, "the token of HF_TOKEN"),
        (401, "RepoNotFound", "", FileNotFoundError, "no credentials are configured: set HF_TOKEN"),
        (403, "GatedRepo", "hf_abcdef", FileNotFoundError, "the token of HF_TOKEN"),
    ],
)
def test_the_hub_names_the_place_of_the_token(monkeypatch, status, code, token, kind, why):
    headers = [("X-Error-Code", code)] * bool(code)
    with answering(lambda ask: (status, [*headers, ("Content-Length", "0")], b"")) as url:
        reach_hub(monkeypatch, url, token)
        with pytest.raises(kind, match=why) as error:
            HubFiles().info("hf://datasets/some/one/a.mp4")
    assert "abcdef" not in str(error.value) and "credentials" in str(error.value)
