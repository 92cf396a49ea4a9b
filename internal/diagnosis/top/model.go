package top

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"spillway.dev/spillway/internal/escape"
)

// The minimum size of a page, in columns and lines.
const (
	leastWidth  = 60
	leastHeight = 8
)

// Model is the terminal view. It requests a Sample every interval, and keys select what
// it shows.
type Model struct {
	ctx      context.Context
	read     func(context.Context, View, uint64) (Sample, error)
	interval time.Duration

	width, height int
	view          View
	order         Order
	filter        string
	typing        bool // the filter
	paused        bool
	chosen        int    // row
	only          uint64 // namespace that the other views are of; 0: all
	onlyName      string
	request       int // number of the last request; an answer to an earlier one is late

	sample Sample
	err    error
	ready  bool
}

// NewModel returns a Model that begins with a view; interval is the time from one Sample to
// the next request.
func NewModel(ctx context.Context, read func(context.Context, View, uint64) (Sample, error), view View, interval time.Duration) Model {
	return Model{ctx: ctx, read: read, view: view, interval: interval, width: 80, height: 24}
}

type answered struct {
	request int
	sample  Sample
	err     error
}

type due struct{ request int }

// Init implements tea.Model.
func (m Model) Init() tea.Cmd { return m.ask() }

func (m Model) ask() tea.Cmd {
	ctx, read, view, only, request := m.ctx, m.read, m.view, m.only, m.request
	return func() tea.Msg {
		s, err := read(ctx, view, only)
		return answered{request, s, err}
	}
}

// anew requests a Sample for the current selection at once.
func (m Model) anew() (tea.Model, tea.Cmd) {
	m.request++
	m.sample, m.err, m.ready, m.chosen = Sample{}, nil, false, 0
	return m, m.ask()
}

// Update implements tea.Model.
func (m Model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case answered:
		if msg.request != m.request {
			return m, nil
		}
		if !m.paused || !m.ready {
			m.sample, m.err, m.ready = msg.sample, msg.err, true
		}
		request := m.request
		return m, tea.Tick(m.interval, func(time.Time) tea.Msg { return due{request} })
	case due:
		if msg.request == m.request {
			return m, m.ask()
		}
	case tea.KeyPressMsg:
		if m.typing {
			return m.typed(msg), nil
		}
		return m.key(msg.String())
	}
	return m, nil
}

func (m Model) key(key string) (tea.Model, tea.Cmd) {
	switch key {
	case "q", "ctrl+c":
		return m, tea.Quit
	case "tab":
		m.view = (m.view + 1) % views
		return m.anew()
	case "1", "2", "3", "4", "5":
		m.view = View(key[0] - '1')
		return m.anew()
	case "e":
		m.order = ByEntries
	case "d":
		m.order = ByDrops
	case "r":
		m.order = ByRate
	case "p", "space":
		m.paused = !m.paused
	case "/":
		m.typing = true
	case "up", "k":
		m.chosen = max(0, m.chosen-1)
	case "down", "j":
		m.chosen = max(0, min(len(m.rows())-1, m.chosen+1))
	case "enter":
		if rows := m.rows(); m.view == Namespaces && m.chosen < len(rows) {
			m.only, m.onlyName, m.view = rows[m.chosen].Inode, rows[m.chosen].Name, Sources
			return m.anew()
		}
	case "esc":
		if m.filter != "" {
			m.filter = ""
		} else if m.only != 0 {
			m.only, m.onlyName, m.view = 0, "", Namespaces
			return m.anew()
		}
	}
	return m, nil
}

// typed updates the filter with a typed key.
func (m Model) typed(msg tea.KeyPressMsg) Model {
	switch msg.String() {
	case "enter":
		m.typing = false
	case "esc", "ctrl+c":
		m.typing, m.filter = false, ""
	case "backspace":
		if m.filter != "" {
			m.filter = m.filter[:len(m.filter)-1]
		}
	default:
		if len(msg.Text) == 1 && msg.Text >= " " && msg.Text <= "~" {
			m.filter += msg.Text
		}
	}
	m.chosen = 0
	return m
}

// rows returns the rows that match the filter, sorted.
func (m Model) rows() []Row {
	rows := slices.DeleteFunc(slices.Clone(m.sample.Rows), func(r Row) bool {
		return !strings.Contains(strings.ToLower(r.Name), strings.ToLower(m.filter))
	})
	sortRows(rows, m.order)
	return rows
}

// View implements tea.Model.
func (m Model) View() tea.View {
	v := tea.NewView(strings.Join(m.lines(), "\n"))
	v.AltScreen = true
	return v
}

// lines returns lines that fit into the terminal.
func (m Model) lines() []string {
	if m.width < leastWidth || m.height < leastHeight {
		return []string{cut(fmt.Sprintf("%dx%d is too small: make it %dx%d", m.width, m.height, leastWidth, leastHeight), max(1, m.width))}
	}
	rows := m.rows()
	columns := m.view.liveColumns(m.width - 2)
	lines := []string{m.head(len(rows)), "  " + line(columns, func(c *Column) any { return c.Name })}
	room := m.height - 4
	first := max(0, min(m.chosen, len(rows)-1)-room+1)
	for i := first; i < len(rows) && i < first+room; i++ {
		mark := "  "
		if i == m.chosen {
			mark = "> "
		}
		lines = append(lines, mark+line(columns, func(c *Column) any { return c.Cell(&rows[i]) }))
	}
	if len(rows) == 0 {
		lines = append(lines, m.empty())
	}
	for len(lines) < m.height-2 {
		lines = append(lines, "")
	}
	lines = append(lines, m.problem(), m.foot())
	for i := range lines {
		lines[i] = cut(escape.Text(lines[i]), m.width)
	}
	return lines
}

func (m Model) head(n int) string {
	head := fmt.Sprintf("spillway top  %d %s by %s", n, m.view.Plural(), m.order)
	if m.only != 0 && m.view != Egress {
		head += "  in " + m.onlyName
	}
	if m.filter != "" || m.typing {
		head += "  filter: " + m.filter
		if m.typing {
			head += "_"
		}
	}
	if m.paused {
		head += "  (paused)"
	}
	return head
}

func (m Model) empty() string {
	switch {
	case m.err != nil:
		return "  nothing could be read"
	case !m.ready:
		return "  reading..."
	case len(m.sample.Rows) > 0:
		return "  no name matches the filter; esc clears it"
	case m.view == Namespaces:
		return "  " + NotInUse(m.sample.Serving)
	case m.sample.Serving != "" && m.view != Egress:
		return "  no entries: " + m.sample.Serving
	}
	return "  no entries"
}

// problem returns the first problem, and the number of others.
func (m Model) problem() string {
	problems := m.sample.Problems
	if m.err != nil {
		problems = []string{m.err.Error()}
	}
	if len(problems) == 0 {
		return ""
	}
	line := "! " + strings.ReplaceAll(problems[0], "\n", "; ")
	if len(problems) > 1 {
		line = fmt.Sprintf("! (%d) %s", len(problems), line[2:])
	}
	return line
}

func (m Model) foot() string {
	if m.typing {
		return "type a part of the name; enter keeps the filter, esc clears it"
	}
	return "tab/1-5 view  e/d/r sort  / filter  enter namespace  esc back  p pause  q quit"
}

// cut shortens s to n characters.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	chars := []rune(s)
	return string(chars[:min(n, len(chars))])
}
