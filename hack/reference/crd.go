package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// crd is the part of a CustomResourceDefinition that the page shows.
type crd struct {
	Spec struct {
		Group string
		Scope string
		Names struct {
			Kind       string
			Plural     string
			ShortNames []string
		}
		Versions []struct {
			Name   string
			Schema struct{ OpenAPIV3Schema schema }
		}
	}
}

// schema is the part of an OpenAPI schema that the page shows.
type schema struct {
	Type        string
	Description string
	Format      string
	Default     any
	Enum        []string
	Required    []string
	Properties  map[string]schema
	Items       *schema
	Additional  *schema `json:"additionalProperties"`
	Minimum     *int64
	Maximum     *int64
	MinItems    *int64
	MaxItems    *int64
	MaxLength   *int64
	Rules       []struct{ Message, FieldPath string } `json:"x-kubernetes-validations"`
}

func policyPage(root string) ([]byte, error) {
	path := filepath.Join(root, chartDir, "crds/donottrackpolicies.yaml")
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var c crd
	if err := yaml.Unmarshal(text, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(c.Spec.Versions) != 1 {
		return nil, fmt.Errorf("%s: %d versions, want 1", path, len(c.Spec.Versions))
	}
	v := c.Spec.Versions[0]
	w := page("the CRD in "+chartDir+"/crds", c.Spec.Names.Kind)
	fmt.Fprintf(w, "%s\n\n", v.Schema.OpenAPIV3Schema.Description)
	table(w, []string{"field", "value"},
		[]string{"apiVersion", code(c.Spec.Group + "/" + v.Name)},
		[]string{"kind", code(c.Spec.Names.Kind)},
		[]string{"scope", strings.ToLower(c.Spec.Scope)},
		[]string{"names for kubectl", code(c.Spec.Names.Plural) + ", " + code(strings.Join(c.Spec.Names.ShortNames, ", "))})
	fields := v.Schema.OpenAPIV3Schema.Properties
	for _, name := range []string{"spec", "status"} {
		rows := schemaRows([][]string{{"field", "type", "meaning"}}, name, fields[name])
		fmt.Fprintf(w, "## %s\n\n", name)
		if about := fields[name].Description; about != "" {
			fmt.Fprintf(w, "%s\n\n", about)
		}
		table(w, rows...)
	}
	w.WriteString("## Validation\n\nThe API server refuses a policy that breaks a rule, with the rule's message.\n\n")
	writeRules(w, "spec", fields["spec"], map[string]bool{})
	return end(w), nil
}

// schemaRows adds a row for each field below at. Fields of a selector have rows once.
func schemaRows(rows [][]string, at string, s schema) [][]string {
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		field := s.Properties[name]
		path := at + "." + name
		below := field
		if field.Items != nil {
			path, below = path+"[]", *field.Items
		}
		about := []string{}
		if slices.Contains(s.Required, name) {
			about = append(about, "Required.")
		}
		about = append(about, field.Description, limits(field))
		rows = append(rows, []string{code(path), cell(typeOf(field)), cell(strings.Join(about, " "))})
		if !isSelector(field) {
			rows = schemaRows(rows, path, below)
		}
	}
	return rows
}

// isSelector reports whether a field is a LabelSelector, which Kubernetes documents.
func isSelector(s schema) bool {
	_, labels := s.Properties["matchLabels"]
	return labels
}

func typeOf(s schema) string {
	switch {
	case isSelector(s):
		return "LabelSelector"
	case s.Items != nil:
		return "list of " + typeOf(*s.Items)
	case len(s.Enum) > 0:
		return "`" + strings.Join(s.Enum, "`, `") + "`"
	case s.Format != "":
		return s.Format
	}
	return s.Type
}

func limits(s schema) string {
	var parts []string
	if s.Default != nil {
		parts = append(parts, fmt.Sprintf("Default: `%v`.", s.Default))
	}
	if s.Minimum != nil && s.Maximum != nil {
		parts = append(parts, fmt.Sprintf("%d to %d.", *s.Minimum, *s.Maximum))
	}
	if s.MaxItems != nil {
		parts = append(parts, fmt.Sprintf("At most %d.", *s.MaxItems))
	}
	return strings.Join(parts, " ")
}

// writeRules lists the validation rules below at, equal ones once.
func writeRules(w *bytes.Buffer, at string, s schema, seen map[string]bool) {
	for _, r := range s.Rules {
		if line := fmt.Sprintf("- `%s`: %s\n", lastOf(at)+r.FieldPath, r.Message); !seen[line] {
			seen[line] = true
			w.WriteString(line)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		writeRules(w, at+"."+name, s.Properties[name], seen)
	}
	if s.Items != nil {
		writeRules(w, at+"[]", *s.Items, seen)
	}
}

// lastOf returns the last field of a path: many fields have one schema.
func lastOf(path string) string { return path[strings.LastIndex(path, ".")+1:] }
