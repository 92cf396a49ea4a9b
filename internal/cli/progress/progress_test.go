package progress

import (
	"strings"
	"testing"
)

func TestProgress(t *testing.T) {
	var plain, terminal strings.Builder
	for _, p := range []*Progress{New(&plain), {w: &terminal, terminal: true}, nil} {
		p.Step("build %s", "x")
		p.Part(1, 2)
		p.Step("measure")
		p.Done()
		p.Done()
	}
	if got, want := plain.String(), "build x\nmeasure\n"; got != want {
		t.Errorf("plain: %q, want %q", got, want)
	}
	const clear = "\r\x1b[K"
	if got, want := terminal.String(), clear+"build x"+clear+"build x (1 of 2)"+clear+"measure"+clear; got != want {
		t.Errorf("terminal: %q, want %q", got, want)
	}
}
