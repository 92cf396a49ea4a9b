package sbom

import (
	"runtime/debug"
	"testing"
)

func TestModulesOfThisRepositoryAreNoComponents(t *testing.T) {
	fork := &debug.Module{Path: "example.org/fork", Version: "v1.0.0"}
	plain := &debug.Module{Path: "example.org/plain", Version: "v1.0.0"}
	for _, c := range []struct{ m, want *debug.Module }{
		{plain, plain},
		{&debug.Module{Path: "example.org/replaced", Version: "v1.0.0", Replace: fork}, fork},
		{&debug.Module{Path: "spillway.dev/spillway", Version: "v0.0.0", Replace: &debug.Module{Path: "..", Version: "(devel)"}}, nil},
		{&debug.Module{Path: "spillway.dev/spillway/lab", Version: "v0.0.0", Replace: &debug.Module{Path: "../lab", Version: "(devel)"}}, nil},
	} {
		if got := external(c.m); got != c.want {
			t.Errorf("%s: %v, want %v", c.m.Path, got, c.want)
		}
	}
}
