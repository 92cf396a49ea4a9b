package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

const (
	chartDir  = "deploy/helm/spillway"
	templates = "hack/helm-docs/"
)

func chartReadme(root string) ([]byte, error) { return helmDocs(root, "README.md.gotmpl") }

func chartValuesPage(root string) ([]byte, error) { return helmDocs(root, "chart-values.md.gotmpl") }

// helmDocs runs helm-docs with a template and the one that writes the table of values.
func helmDocs(root, template string) ([]byte, error) {
	cmd := exec.Command("go", "tool", "-modfile=hack/helm-docs/go.mod", "helm-docs", "--dry-run", "--sort-values-order=file",
		"--chart-search-root="+chartDir, "--template-files="+templates+"values.md.gotmpl,"+templates+template)
	cmd.Dir = root
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("run helm-docs: %w: %s", err, stderr.Bytes())
	}
	if stdout.Len() == 0 { // it logs an error of a template, and exits with 0
		return nil, fmt.Errorf("run helm-docs: %s", stderr.Bytes())
	}
	return end(&stdout), nil
}

// row matches a row of the table of values, with its name and its description.
var row = regexp.MustCompile("(?m)^\\| `([^`]+)`<br>[a-z]+ \\| (.*?)<br>Default: ")

// chartSchema returns values.schema.json with the descriptions of values.yaml.
func chartSchema(root string) ([]byte, error) {
	values, err := chartValuesPage(root)
	if err != nil {
		return nil, err
	}
	about := map[string]string{}
	for _, m := range row.FindAllStringSubmatch(string(values), -1) {
		if about[m[1]] = strings.ReplaceAll(m[2], "`", ""); m[2] == "" {
			return nil, fmt.Errorf("%s has no \"# --\" comment in values.yaml", m[1])
		}
	}
	text, err := os.ReadFile(filepath.Join(root, chartDir, "values.schema.json"))
	if err != nil {
		return nil, err
	}
	var schema map[string]any
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	if err := dec.Decode(&schema); err != nil {
		return nil, fmt.Errorf("values.schema.json: %w", err)
	}
	describe(schema, "", about)
	for name := range about {
		return nil, fmt.Errorf("%s is not in values.schema.json: add it", name)
	}
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	err = enc.Encode(schema)
	return out.Bytes(), err
}

// describe sets the descriptions of the values below at, and removes others. It deletes
// those that it sets from about.
func describe(schema map[string]any, at string, about map[string]string) {
	properties, _ := schema["properties"].(map[string]any)
	for name, v := range properties {
		value, ok := v.(map[string]any)
		if !ok {
			continue
		}
		delete(value, "description")
		if text, ok := about[at+name]; ok {
			value["description"] = text
			delete(about, at+name)
		}
		describe(value, at+name+".", about)
	}
}

// icon matches the line of Chart.yaml with the icon.
var icon = regexp.MustCompile(`(?m)^icon: data:image/svg\+xml;base64,\S*`)

// chartMetadata returns Chart.yaml with icon.svg as its icon: no server has to publish it.
func chartMetadata(root string) ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(root, chartDir, "Chart.yaml"))
	if err != nil {
		return nil, err
	}
	svg, err := os.ReadFile(filepath.Join(root, chartDir, "icon.svg"))
	if err != nil {
		return nil, err
	}
	if !icon.Match(text) {
		return nil, errors.New("no line begins with icon: data:image/svg+xml;base64,")
	}
	return icon.ReplaceAllLiteral(text, []byte("icon: data:image/svg+xml;base64,"+base64.StdEncoding.EncodeToString(svg))), nil
}

// copyOf returns another file's content: Helm reads files below the chart only.
func copyOf(path string) func(string) ([]byte, error) {
	return func(root string) ([]byte, error) { return os.ReadFile(filepath.Join(root, path)) }
}
