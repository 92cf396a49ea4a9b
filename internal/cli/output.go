package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/internal/page"
)

// Output is the value of the flag --output: the form of a command's result.
type Output string

// The forms.
const (
	Table Output = "table"
	Wide  Output = "wide" // a table with all columns, of any width
	JSON  Output = "json"
	YAML  Output = "yaml"
)

var formats = []string{string(Table), string(Wide), string(JSON), string(YAML)}

// AddFlag binds -o to o.
func (o *Output) AddFlag(cmd *cobra.Command) {
	cmd.Flags().StringVarP((*string)(o), "output", "o", string(Table), "Output `format`: table, wide (all columns), json or yaml.")
	Choices(cmd, "output", formats...)
}

// Validate returns a UsageError for an unknown format.
func (o Output) Validate() error {
	if !slices.Contains(formats, string(o)) {
		return UsageErrorf("--output %q: not a format: use %s", string(o), strings.Join(formats, ", "))
	}
	return nil
}

// ForPrograms reports that the result is for programs: JSON or YAML.
func (o Output) ForPrograms() bool { return o == JSON || o == YAML }

// Result is a result of a command: encoding/json encodes it, and Write prints it as text
// on a page.Page.
type Result interface{ Write(io.Writer) error }

// Print writes a result in the requested form.
func (o Output) Print(w io.Writer, result Result) error {
	if o.ForPrograms() {
		return o.Encode(w, result, "  ")
	}
	p := *page.Of(w)
	p.Wide = o == Wide
	return result.Write(&p)
}

// Encode writes a value as one JSON document, or as one YAML document after a line "---".
// An empty indent makes the JSON one line.
func (o Output) Encode(w io.Writer, value any, indent string) error {
	var err error
	if o == YAML {
		var text []byte
		if text, err = yaml.Marshal(value); err == nil {
			_, err = w.Write(append([]byte("---\n"), text...))
		}
	} else {
		enc := json.NewEncoder(w)
		enc.SetIndent("", indent)
		err = enc.Encode(value)
	}
	if err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	return nil
}
