package page

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"
)

func example() *Table {
	t := NewTable(Column{Name: "NAMESPACE", Least: 12, Cut: true}, Column{Name: "ENTRIES", Right: true},
		Column{Name: "WHY", Least: 10}, Column{Name: "INVALID", Right: true, Wide: true})
	t.Row("cni-5b2c1d7e-0c3f-4a4e-9d8a-1f2e3d4c5b6a", 3, "a reason of so many words that it needs several lines", 7)
	t.Row("a\x1b[2J\nb", 524288, "short", 8)
	t.Foot("2 namespaces, the fullest at 99.6 %%")
	return t
}

func printed(t *testing.T, p Page) string {
	t.Helper()
	var out bytes.Buffer
	p.Writer = &out
	if err := example().Write(&p); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestATableFitsThePage(t *testing.T) {
	for _, width := range []int{40, 60, 80, 120} {
		for line := range strings.Lines(printed(t, Page{Width: width})) {
			if n := ansi.StringWidth(strings.TrimSuffix(line, "\n")); n > width || strings.HasSuffix(line, " \n") {
				t.Errorf("%d columns of %d: %q", n, width, line)
			}
		}
	}
	want := `NAMESPACE             ENTRIES  WHY
cni-5b2c1d7e-0c3f-4…        3  a reason of so many
                               words that it needs
                               several lines
a\x1b[2J\nb            524288  short
2 namespaces, the fullest at 99.6 %
`
	if got := printed(t, Page{Width: 52}); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

// A program that reads the table gets whole names and one line for each row.
func TestATableWithoutALimitIsWhole(t *testing.T) {
	for _, p := range []Page{{}, {Width: 40, Wide: true}} {
		got := printed(t, p)
		if strings.Count(got, "\n") != 4 || !strings.Contains(got, "1f2e3d4c5b6a ") || strings.Contains(got, "\x1b") ||
			strings.Contains(got, "INVALID") != p.Wide {
			t.Errorf("%+v:\n%s", p, got)
		}
	}
}

func TestColorsFollowTheReader(t *testing.T) {
	got := printed(t, Page{Width: 60, Color: true})
	if ansi.Strip(got) != printed(t, Page{Width: 60}) || !strings.HasPrefix(got, "\x1b[1mNAMESPACE") || strings.Count(got, "\x1b") != 2 {
		t.Errorf("colors: %q", got)
	}
	var out bytes.Buffer
	t.Setenv("CLICOLOR_FORCE", "1")
	t.Setenv("TERM", "xterm-256color")
	if !Of(&out).Color {
		t.Error("CLICOLOR_FORCE has no effect")
	}
	t.Setenv("CLICOLOR_FORCE", "")
	if Of(&out).Color {
		t.Error("colors in a pipe")
	}
	p := Of(&out)
	if p.Paint(Bad, "x") != "x" || Of(p) != p {
		t.Error("a page without colors has colors")
	}
}

func TestTheWidthFollowsTheEnvironment(t *testing.T) {
	for columns, want := range map[string]int{"": 0, "80": 80, "wide": 0, "-1": 0} {
		t.Setenv("COLUMNS", columns)
		if got := Of(&bytes.Buffer{}).Width; got != want {
			t.Errorf("COLUMNS=%q: %d, want %d", columns, got, want)
		}
	}
}

func TestWrapKeepsNamesWhole(t *testing.T) {
	p := Page{Width: 24}
	if got, want := p.Wrap("set net.netfilter.nf-conntrack-max to 5", "  "), "  set\n  net.netfilter.nf-conntrack-max\n  to 5"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got, want := p.Wrap("two words-with-hyphens and more", ""), "two words-with-hyphens\nand more"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestCounted(t *testing.T) {
	if got := []string{Counted(1, "entry"), Counted(2, "entry"), Counted(0, "fix"), Counted(2, "line")}; !slices.Equal(got,
		[]string{"1 entry", "2 entries", "0 fixes", "2 lines"}) {
		t.Errorf("%q", got)
	}
}
