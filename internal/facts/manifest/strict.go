package manifest

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"
)

// strict decodes JSON as an API server with fieldValidation=Strict does: names
// are case-sensitive, and unknown or repeated fields are errors with their path.
func strict(raw []byte, into any) []problem {
	unknown, err := kjson.UnmarshalStrict(raw, into)
	if err != nil {
		p := decodeProblem(err)
		if p.field == "" { // a time decodes itself, without its path
			if at, value := badTime("", raw); at != "" {
				p = problem{field: at, what: clip(string(value)) + ` is not a time; write one like "2026-01-31T12:00:00Z"`}
			}
		}
		return []problem{p}
	}
	var problems []problem
	for _, err := range unknown {
		p := problem{what: err.Error()}
		var at kjson.FieldError
		if errors.As(err, &at) {
			p.field, p.what = at.FieldPath(), "is unknown; check its spelling and its place"
			if strings.HasPrefix(err.Error(), "duplicate") {
				p.what = "is present twice; remove one"
			}
		}
		problems = append(problems, p)
	}
	return problems
}

// named lists the mappings whose keys the author chooses.
var named = set("labels", "annotations", "selector", "matchLabels", "nodeSelector")

// badTime returns the path and the value of the first invalid time. It finds times by the
// field names that all of Kubernetes uses.
func badTime(at string, raw json.RawMessage) (string, json.RawMessage) {
	var fields map[string]json.RawMessage
	var items []json.RawMessage
	if json.Unmarshal(raw, &fields) == nil {
		for _, name := range slices.Sorted(maps.Keys(fields)) {
			path := strings.TrimPrefix(at+"."+name, ".")
			if name == "time" || strings.HasSuffix(name, "Time") || strings.HasSuffix(name, "Timestamp") {
				if new(metav1.Time).UnmarshalJSON(fields[name]) != nil {
					return path, fields[name]
				}
			} else if !named[name] {
				if path, value := badTime(path, fields[name]); path != "" {
					return path, value
				}
			}
		}
	} else if json.Unmarshal(raw, &items) == nil {
		for i, item := range items {
			if path, value := badTime(fmt.Sprintf("%s[%d]", at, i), item); path != "" {
				return path, value
			}
		}
	}
	return "", nil
}

func decodeProblem(err error) problem {
	var mismatch *json.UnmarshalTypeError
	if errors.As(err, &mismatch) {
		got, _, _ := strings.Cut(mismatch.Value, " ")
		return problem{field: mismatch.Field, what: fmt.Sprintf("is of type %s; %s is expected", got, want(mismatch.Type))}
	}
	return problem{what: clip(strings.TrimPrefix(err.Error(), "json: "))}
}

// want names a Go type in YAML's terms.
func want(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string (quote it)"
	case reflect.Bool:
		return "true or false"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "a mapping"
	case reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Int:
		return fmt.Sprintf("a whole number of %d bits", t.Bits())
	}
	return t.String()
}
