package maps

import (
	"bytes"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/page"
)

func TestEntriesFitTheTerminal(t *testing.T) {
	var key, value []inspect.Field
	for _, name := range []string{"addr", "external_route", "internal_route", "next_hop_ifindex"} {
		key = append(key, inspect.Field{Name: name, Value: "2001:db8:ff::10"})
		value = append(value, inspect.Field{Name: name, Value: 123456})
	}
	for _, width := range clitest.Widths {
		var out bytes.Buffer
		if err := write(&page.Page{Writer: &out, Width: width}, cli.Table, key, value); err != nil {
			t.Fatal(err)
		}
		clitest.Fits(t, width, out.String())
		if n := strings.Count(out.String(), "="); n != len(key)+len(value) || strings.Count(out.String(), "\n") < 2 {
			t.Errorf("%d columns: %s", width, &out)
		}
		for _, word := range strings.Fields(out.String()) {
			if word != "->" && !strings.HasSuffix(word, "=2001:db8:ff::10") && !strings.HasSuffix(word, "=123456") {
				t.Errorf("%d columns: %q is broken", width, word)
			}
		}
	}
	var out bytes.Buffer
	if err := write(&out, cli.Table, key, value); err != nil || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("a program gets %q, %v", &out, err)
	}
}
