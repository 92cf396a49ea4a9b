package top

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"

	"spillway.dev/spillway/test/await"
)

// page is a Model that shows a Sample.
func page(t *testing.T, s Sample) Model {
	t.Helper()
	m := NewModel(t.Context(), func(context.Context, View, uint64) (Sample, error) { return s, nil }, Namespaces, time.Hour)
	return answer(t, m)
}

// answer gives the Model a Sample.
func answer(t *testing.T, m Model) Model {
	t.Helper()
	next, _ := m.Update(m.ask()())
	return next.(Model)
}

// press sends keys one after another, and answers the requests that they cause.
func press(t *testing.T, m Model, keys ...string) Model {
	t.Helper()
	for _, key := range keys {
		msg := tea.KeyPressMsg{Text: key, Code: []rune(key)[0]}
		switch key {
		case "tab":
			msg = tea.KeyPressMsg{Code: tea.KeyTab}
		case "enter":
			msg = tea.KeyPressMsg{Code: tea.KeyEnter}
		case "esc":
			msg = tea.KeyPressMsg{Code: tea.KeyEscape}
		case "down":
			msg = tea.KeyPressMsg{Code: tea.KeyDown}
		case "backspace":
			msg = tea.KeyPressMsg{Code: tea.KeyBackspace}
		}
		before := m.request
		next, _ := m.Update(msg)
		if m = next.(Model); m.request != before {
			m = answer(t, m)
		}
	}
	return m
}

// names returns the rows as they are shown.
func names(m Model) string {
	var list []string
	for _, r := range m.rows() {
		list = append(list, r.Name)
	}
	return strings.Join(list, " ")
}

var three = Sample{Rows: []Row{
	{Name: "alpha", Inode: 1, Entries: 10, Drops: 5, PerSec: 1, Rate: 7},
	{Name: "beta", Inode: 2, Entries: 30, Max: 60, Drops: 1, Rate: 0},
	{Name: "Gamma", Inode: 3, Entries: 20, Drops: 9, PerSec: 3, Rate: 2},
}}

func TestKeysSortAndFilter(t *testing.T) {
	m := page(t, three)
	for _, row := range []struct{ keys, want string }{
		{"", "beta Gamma alpha"},
		{"d", "Gamma alpha beta"},
		{"r", "alpha Gamma beta"},
		{"r e", "beta Gamma alpha"},
		{"/ a m m enter", "Gamma"},
		{"/ a x backspace enter d", "Gamma alpha beta"},
		{"/ x x esc", "beta Gamma alpha"},
		{"/ x enter esc", "beta Gamma alpha"},
		{"/ q", ""}, // a letter of the filter, not the end
	} {
		if got := names(press(t, m, strings.Fields(row.keys)...)); got != row.want {
			t.Errorf("%q: %s, want %s", row.keys, got, row.want)
		}
	}
}

func TestKeysChooseViewAndNamespace(t *testing.T) {
	var asked []string
	m := NewModel(t.Context(), func(_ context.Context, v View, only uint64) (Sample, error) {
		asked = append(asked, fmt.Sprint(v, only))
		return three, nil
	}, Namespaces, time.Hour)
	m = press(t, answer(t, m), "tab", "tab", "4", "5", "1", "down", "enter", "2", "esc")
	want := "namespaces0 services0 endpoints0 sources0 egress0 namespaces0 sources3 services3 namespaces0"
	if got := strings.ReplaceAll(strings.Join(asked, ","), " ", ""); got != strings.ReplaceAll(want, " ", ",") {
		t.Errorf("asked for %s, want %s", got, want)
	}
	if m.View().AltScreen != true {
		t.Error("the shell's screen is written over")
	}
}

func TestAnAnswerToAnEarlierQuestionIsLate(t *testing.T) {
	m := page(t, three)
	late := m.ask()()
	next, _ := m.Update(tea.KeyPressMsg{Text: "2", Code: '2'})
	next, _ = next.Update(late)
	if m := next.(Model); m.ready || names(m) != "" {
		t.Errorf("rows of namespaces are shown as services: %s", names(m))
	}
}

func TestPauseKeepsThePage(t *testing.T) {
	m := press(t, page(t, three), "p")
	m.read = func(context.Context, View, uint64) (Sample, error) { return Sample{}, nil }
	if m = answer(t, m); names(m) == "" {
		t.Error("a paused page is renewed")
	}
	if m = answer(t, press(t, m, "p")); names(m) != "" {
		t.Error("it is not renewed afterwards")
	}
	m = press(t, page(t, three), "p", "2")
	if names(m) == "" {
		t.Error("a paused page has no rows of the view that was chosen then")
	}
}

// A page fits, whatever is on it.
func TestAPageFits(t *testing.T) {
	many := Sample{Problems: []string{strings.Repeat("no permission ", 20), "more"}}
	for i := range 300 {
		many.Rows = append(many.Rows, Row{Name: fmt.Sprintf("tcp [fd00:10:96:0:1:2:3:%x]:65535 a-pod-with-a-long-name-%d", i, i),
			Address: Address{"tcp", netip.MustParseAddrPort("[fd00:10:96:0:1:2:3:4444]:65535")},
			Owner:   Owner{Pod: fmt.Sprintf("a-long-namespace/a-pod-with-a-long-name-%d", i)},
			Entries: 1_000_000, Max: 1_000_000, Rate: 99999, Drops: 12345678, PerSec: 99999, Compared: true})
	}
	for view := range views {
		for _, size := range [][2]int{{80, 24}, {60, 8}, {200, 50}, {61, 9}} {
			t.Run(fmt.Sprint(view, size), func(t *testing.T) { fits(t, press(t, page(t, many), fmt.Sprint(1+int(view))), size[0], size[1]) })
		}
	}
}

// fits checks a page in a terminal of some size, far down the rows.
func fits(t *testing.T, start tea.Model, width, height int) {
	t.Helper()
	m, _ := start.Update(tea.WindowSizeMsg{Width: width, Height: height})
	for range 40 {
		m, _ = m.Update(tea.KeyPressMsg{Code: tea.KeyDown})
	}
	lines := m.(Model).lines()
	if len(lines) != height {
		t.Errorf("%d lines", len(lines))
	}
	chosen := false
	for i, l := range lines {
		if len(l) > width {
			t.Errorf("%d columns: %q", len(l), l)
		}
		end := map[bool]string{true: "/s", false: "99999"}[i == 1]
		if i > 0 && i < height-2 && (len(l) != width || !strings.HasSuffix(l, end)) {
			t.Errorf("the last column does not end at the edge: %q", l)
		}
		chosen = chosen || strings.HasPrefix(l, ">")
	}
	if !chosen {
		t.Error("the chosen row is not shown")
	}
}

// A destination with its port is whole, where it is of IPv4. The pod is cut before.
func TestADestinationOfEgressFitsTheSmallestTerminal(t *testing.T) {
	to := Address{"tcp", netip.MustParseAddrPort("203.113.100.255:65535")}
	row := Row{Name: "x", Address: to, Owner: Owner{Pod: "a-long-namespace/a-long-name"}, Entries: 29300}
	m := press(t, page(t, Sample{Rows: []Row{row}}), "5")
	for width, pod := range map[int]string{leastWidth: "a-long-nam", 120: "a-long-namespace/a-long-name"} {
		next, _ := m.Update(tea.WindowSizeMsg{Width: width, Height: 24})
		lines := next.(Model).lines()
		head, got := strings.Fields(lines[1]), strings.Fields(lines[2])
		if strings.Join(head, " ") != "POD DESTINATION ENTRIES +/s" || !strings.HasPrefix(got[1], pod) ||
			strings.Join(got[2:], " ") != "tcp 203.113.100.255:65535 29300 -" {
			t.Errorf("%d: %q, %q", width, lines[1], lines[2])
		}
	}
}

func TestATooSmallTerminalIsOneClearLine(t *testing.T) {
	for _, size := range [][2]int{{59, 24}, {80, 7}, {40, 3}, {0, 0}} {
		m, _ := page(t, three).Update(tea.WindowSizeMsg{Width: size[0], Height: size[1]})
		lines := m.(Model).lines()
		if len(lines) != 1 || size[0] >= 40 && !strings.Contains(lines[0], "too small: make it 60x8") {
			t.Errorf("%v: %q", size, lines)
		}
		m, _ = m.Update(tea.WindowSizeMsg{Width: 80, Height: 24})
		if len(m.(Model).lines()) != 24 {
			t.Error("it does not come back when there is room again")
		}
	}
}

func TestWhatCannotBeReadIsSaidAndTheRestIsShown(t *testing.T) {
	m := page(t, Sample{Rows: three.Rows, Problems: []string{"no permission for beta"}})
	if all := strings.Join(m.lines(), "\n"); !strings.Contains(all, "! no permission for beta") || !strings.Contains(all, "alpha") {
		t.Error(all)
	}
	m.read = func(context.Context, View, uint64) (Sample, error) { return Sample{}, errors.New("no netlink") }
	if all := strings.Join(answer(t, m).lines(), "\n"); !strings.Contains(all, "! no netlink") ||
		!strings.Contains(all, "nothing could be read") {
		t.Error(all)
	}
}

// The whole program, with a terminal's bytes at both ends.
func TestTheProgramRunsAndEnds(t *testing.T) {
	var screen bytes.Buffer
	in, keys := io.Pipe()
	reads := make(chan bool, 2) // the second begins after the first is shown
	m := NewModel(t.Context(), func(context.Context, View, uint64) (Sample, error) {
		select {
		case reads <- true:
		default:
		}
		return three, nil
	}, Namespaces, 10*time.Millisecond)
	p := tea.NewProgram(m, tea.WithInput(in), tea.WithOutput(&screen), tea.WithWindowSize(80, 24), tea.WithoutSignals(),
		tea.WithEnvironment([]string{"TERM=xterm"}))
	go func() {
		<-reads
		<-reads
		for _, key := range []string{"d", "/", "a", "l", "\r", "q"} {
			_, _ = io.WriteString(keys, key)
		}
	}()
	ctx, stop := context.WithTimeout(t.Context(), await.Limit)
	defer stop()
	context.AfterFunc(ctx, p.Kill)
	last, err := p.Run()
	if err != nil {
		t.Fatal(err)
	}
	if got := names(last.(Model)); got != "alpha" || last.(Model).order != ByDrops {
		t.Errorf("it ended with %q by %s", got, last.(Model).order)
	}
	if !strings.Contains(screen.String(), "spillway top") {
		t.Errorf("screen: %q", screen.String())
	}
}

// Any user may choose names, and the first Sample has no predecessor.
func TestNamesAndFirstSamplesAreShownAsTheyAre(t *testing.T) {
	m := page(t, Sample{Rows: []Row{{Name: "a\x1b[2J\nb", Entries: 10}, {Name: "c", Entries: 1, Compared: true, Rate: 4}},
		Problems: []string{"in a\x1b[2J: locked"}})
	lines := m.lines()
	if text := strings.Join(lines, "|"); strings.ContainsAny(text, "\x1b\n") || !strings.Contains(text, `a\x1b[2J\nb`) {
		t.Errorf("%q", text)
	}
	if first, second := strings.Fields(lines[2]), strings.Fields(lines[3]); first[4] != "-" || second[3] != "+4" {
		t.Errorf("%q, %q", first, second)
	}
}
