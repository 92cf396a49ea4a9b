package objects

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/test/must"
)

func TestEachVerdictHasAMeaning(t *testing.T) {
	spec, err := LoadTC()
	must.Do(t, err)
	names, err := VerdictNames(spec)
	must.Do(t, err)
	for _, name := range names {
		v, known := VerdictOf(name)
		if !known || v.Meaning == "" {
			t.Errorf("verdict %s has no meaning", name)
		}
		// The metric of drops has the verdicts with this prefix.
		if strings.HasPrefix(name, "drop_") && !v.Effect.Fails() {
			t.Errorf("verdict %s does not drop", name)
		}
	}
	for name := range verdicts {
		if !slices.Contains(names, name) {
			t.Errorf("%s is no verdict", name)
		}
	}
}

// The programs and the agent agree which verdicts are refusals of a Service.
func TestVerdictRefuses(t *testing.T) {
	text, err := os.ReadFile("../../../../bpf/abi.h")
	must.Do(t, err)
	_, body, _ := strings.Cut(string(text), " verdict_refuses(enum verdict verdict)\n")
	body, _, found := strings.Cut(body, "\tdefault:\n")
	if !found {
		t.Fatal("bpf/abi.h has no verdict_refuses with a switch")
	}
	var c, own []string
	for _, match := range regexp.MustCompile(`(?m)^\tcase (\w+):$`).FindAllStringSubmatch(body, -1) {
		c = append(c, strings.ToLower(match[1]))
	}
	for name, v := range verdicts {
		if v.Effect == Refused {
			own = append(own, name)
		}
	}
	slices.Sort(c)
	slices.Sort(own)
	if !slices.Equal(c, own) {
		t.Errorf("verdict_refuses has %v, the agent %v", c, own)
	}
}
