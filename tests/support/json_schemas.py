"""JSON schemas by the keyword that they are about, for tests that outputs are valid.

The first ones can be enforced. The others cannot, and have to be refused: a keyword that is passed
over in silence is worse than none.
"""

from __future__ import annotations

import json
from typing import Any

from jsonschema_rs import Draft202012Validator

Schema = dict[str, Any] | bool

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
SHORT = {"type": "string", "maxLength": 6}


def thing(**properties: Schema) -> dict[str, Any]:
    """An object of just these."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


ENFORCED: dict[str, Schema] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": INTEGER,
    "number": NUMBER,
    "string": SHORT,
    "one of several types": {"type": ["integer", "null", "boolean"]},
    "true": True,
    "array of anything": {"type": "array", "maxItems": 2},
    "enum of texts": {"enum": ["red", "green", "blue"]},
    "enum of everything": {"enum": [1, 2.5, "x", None, True, {"a": [1]}, []]},
    "enum within a type": {"type": "string", "enum": ["a", "b"]},
    "enum with escapes": {"enum": ['"', "\\", "\n", "é", "日本"]},
    "const number": {"const": 42},
    "const object": {"const": {"a": [1, {"b": None}]}},
    "const text": {"const": 'say "hi"\n'},
    "properties": thing(a=INTEGER, b=SHORT),
    "optional properties": {
        "type": "object",
        "properties": {"a": INTEGER, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "no properties": {"type": "object", "additionalProperties": False},
    "required without a schema": {
        "type": "object",
        "required": ["z"],
        "additionalProperties": INTEGER,
    },
    "additionalProperties of a schema": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "additionalProperties": INTEGER,
        "required": ["a"],
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": INTEGER},
        "additionalProperties": False,
    },
    "maxProperties": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2},
    "minProperties": {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "minProperties": 1,
        "maxProperties": 2,
    },
    "items": {"type": "array", "items": INTEGER},
    "minItems": {"type": "array", "items": INTEGER, "minItems": 3, "maxItems": 4},
    "maxItems": {"type": "array", "items": INTEGER, "maxItems": 2},
    "maxItems of none": {"type": "array", "maxItems": 0},
    "prefixItems": {
        "type": "array",
        "prefixItems": [INTEGER, SHORT],
        "items": False,
        "minItems": 2,
    },
    "prefixItems and more": {
        "type": "array",
        "prefixItems": [{"const": "head"}],
        "items": {"type": "boolean"},
        "minItems": 2,
        "maxItems": 4,
    },
    "arrays of arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2},
        "minItems": 2,
        "maxItems": 2,
    },
    "minimum": {"type": "integer", "minimum": 17},
    "maximum": {"type": "integer", "maximum": -3},
    "minimum and maximum": {"type": "integer", "minimum": -12, "maximum": 133},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "bounds of numbers": {"type": "number", "minimum": 0.5, "maximum": 1.25},
    "exclusive bounds of numbers": {
        "type": "number",
        "exclusiveMinimum": 0,
        "exclusiveMaximum": 1,
    },
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "multipleOf within bounds": {
        "type": "integer",
        "multipleOf": 5,
        "minimum": 10,
        "maximum": 99,
    },
    "multipleOf a fraction": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 9},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern anywhere": {"type": "string", "pattern": "ab", "maxLength": 6},
    "pattern with a choice": {"type": "string", "pattern": "^(yes|no|maybe)$"},
    "minLength": {"type": "string", "minLength": 3, "maxLength": 5},
    "maxLength of none": {"type": "string", "maxLength": 0},
    "length in characters": {"type": "string", "pattern": "^[äöü]+$", "maxLength": 3},
    "format date": {"type": "string", "format": "date"},
    "format time": {"type": "string", "format": "time"},
    "format date-time": {"type": "string", "format": "date-time"},
    "format uuid": {"type": "string", "format": "uuid"},
    "format ipv4": {"type": "string", "format": "ipv4"},
    "anyOf": {"anyOf": [INTEGER, {"type": "boolean"}]},
    "anyOf objects": {"anyOf": [thing(a=INTEGER), thing(b={"type": "boolean"})]},
    "anyOf beside a type": {"type": "integer", "anyOf": [{"maximum": 3}, {"minimum": 90}]},
    "oneOf of types": {"oneOf": [SHORT, INTEGER]},
    "oneOf by a tag": {
        "oneOf": [
            thing(kind={"const": "circle"}, radius=INTEGER),
            thing(kind={"const": "square"}, side=INTEGER),
        ]
    },
    "allOf": {"allOf": [INTEGER, {"minimum": 3}, {"maximum": 30}]},
    "allOf objects": {
        "type": "object",
        "allOf": [
            {"properties": {"a": INTEGER}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "$ref": {"$ref": "#/$defs/small", "$defs": {"small": {"type": "integer", "maximum": 9}}},
    "$ref to definitions": {
        "properties": {"a": {"$ref": "#/definitions/b"}},
        "type": "object",
        "required": ["a"],
        "additionalProperties": False,
        "definitions": {"b": {"type": "boolean"}},
    },
    "$ref with a sibling": {
        "$ref": "#/$defs/some",
        "maximum": 20,
        "$defs": {"some": {"type": "integer", "minimum": 10}},
    },
    "recursive list": {
        "$ref": "#/$defs/list",
        "$defs": {
            "list": {
                "anyOf": [{"type": "null"}, thing(head=INTEGER, tail={"$ref": "#/$defs/list"})]
            }
        },
    },
    "recursive tree": {
        "type": "object",
        "properties": {
            "value": INTEGER,
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
        },
        "required": ["value"],
        "additionalProperties": False,
    },
    "nested": thing(
        user=thing(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 150}),
        tags={"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    ),
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "t",
        "description": "d",
        "type": "integer",
        "default": 3,
        "examples": [4],
        "deprecated": True,
        "$comment": "c",
    },
    "keywords of other types": {"type": "integer", "minLength": 3, "maxItems": 1, "minimum": 2},
    "a property that may not be": {
        "type": "object",
        "properties": {"a": False, "b": INTEGER},
        "required": ["b"],
        "additionalProperties": False,
    },
    "names that need escapes": thing(**{'a"b': INTEGER, "c\\d": INTEGER, "é": INTEGER}),
}

REFUSED: dict[str, Schema] = {
    "not": {"type": "integer", "not": {"const": 3}},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 3}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": INTEGER},
    "minContains": {"type": "array", "minContains": 1},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 2}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "oneOf that overlaps": {"oneOf": [INTEGER, {"minimum": 2}]},
    "a format that nobody knows": {"type": "string", "format": "color"},
    "look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "a reference to nowhere": {"$ref": "#/$defs/none"},
    "a reference abroad": {"$ref": "https://example.com/schema.json"},
    "a reference to itself": {"$ref": "#"},
    "no such type": {"type": "text"},
    "bounds the wrong way": {"type": "integer", "minimum": 5, "maximum": 3},
    "false": False,
    "an empty enum": {"enum": []},
    "properties that are a list": {"type": "object", "properties": ["a"]},
}


def valid(schema: Schema, text: str) -> bool:
    """Checks a text with another implementation of the standard than the one that made it."""
    return Draft202012Validator(schema, validate_formats=True).is_valid(json.loads(text))
