package escape

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

var nasty = []string{"", "plain", "a b", "$(touch /x)", "`touch /x`", "it's", "a;b", "*", "~", "#", "!", "a\nb", `\`, `"`, "'", "x=1",
	"--net=/run/netns/a;reboot", "&|<>"}

// A shell gets back what was quoted.
func TestAShellReadsEachWordAsItWas(t *testing.T) {
	var words []string
	for _, s := range nasty {
		words = append(words, Shell(s))
	}
	out, err := exec.Command("sh", "-c", `printf '%s\0' `+strings.Join(words, " ")).Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00"); !slices.Equal(got, nasty) {
		t.Errorf("got  %q\nwant %q", got, nasty)
	}
	if got := ShellWords(strings.Join(words, "  ")); !slices.Equal(got, words) {
		t.Errorf("got  %q\nwant %q", got, words)
	}
}

func TestATerminalOnlyShowsText(t *testing.T) {
	for s, want := range map[string]string{
		"eth0": "eth0", "größe ☃": "größe ☃", `a"b\c`: `a"b\c`,
		"\x1b[2J": `\x1b[2J`, "a\nb\tc": `a\nb\tc`, "\u009b1m": `\u009b1m`, "\xff": `\xff`, "\u202eabc": `\u202eabc`, "�": "�",
	} {
		if got := Text(s); got != want {
			t.Errorf("%q is %s, want %s", s, got, want)
		}
		if Shown(s) != (s == want) {
			t.Errorf("%q: Shown is %v", s, Shown(s))
		}
	}
}
