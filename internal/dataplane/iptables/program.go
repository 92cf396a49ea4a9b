package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// programs are the binaries of one variant and one family.
type programs struct {
	variant Variant
	save    string
	restore string
	cfg     *Config
}

// oldest is the first version whose iptables-restore waits for the lock and whose
// MASQUERADE has --random-fully.
var oldest = [3]int{1, 6, 2}

// findPrograms looks for the binaries of a variant.
func findPrograms(ctx context.Context, cfg *Config, v Variant, f model.Family) (*programs, error) {
	base := "iptables"
	if f == model.IPv6 {
		base = "ip6tables"
	}
	p := &programs{variant: v, cfg: cfg}
	for path, name := range map[*string]string{&p.save: "save", &p.restore: "restore"} {
		found, err := exec.LookPath(base + "-" + string(v) + "-" + name)
		if err != nil {
			return nil, fmt.Errorf("find %s-%s-%s: not in PATH: install the package iptables", base, v, name)
		}
		*path = found
	}
	out, err := p.run(ctx, p.restore, nil, "--version")
	if err != nil {
		return nil, fmt.Errorf("ask %s for its version: %w", p.restore, err)
	}
	if have, ok := parseVersion(out); !ok || less(have, oldest) {
		return nil, fmt.Errorf("%s is too old (%s): %d.%d.%d is needed, for --wait and MASQUERADE --random-fully: install a newer package "+
			"iptables",
			p.restore, firstLine(out), oldest[0], oldest[1], oldest[2])
	}
	return p, nil
}

var versionText = regexp.MustCompile(`v(\d+)\.(\d+)\.(\d+)`)

func parseVersion(text string) (v [3]int, ok bool) {
	m := versionText.FindStringSubmatch(text)
	if m == nil {
		return v, false
	}
	for i := range v {
		v[i], _ = strconv.Atoi(m[i+1])
	}
	return v, true
}

func less(a, b [3]int) bool {
	for i := range a {
		if a[i] != b[i] {
			return a[i] < b[i]
		}
	}
	return false
}

// programTimeout limits the run time of a program that hangs for another reason than the
// lock. The nft variant is slow with many Services.
const programTimeout = 5 * time.Minute

// run runs a program and returns what it wrote to standard output.
func (p *programs) run(ctx context.Context, path string, in io.Reader, args ...string) (string, error) {
	var out bytes.Buffer
	err := p.stream(ctx, path, in, &out, args...)
	return out.String(), err
}

// stream runs a program. If the program fails, the error is its message.
func (p *programs) stream(ctx context.Context, path string, in io.Reader, out io.Writer, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, programTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stdin, cmd.Stdout = in, out
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if p.cfg.lockFile != "" {
		cmd.Env = append(cmd.Env, "XTABLES_LOCKFILE="+p.cfg.lockFile)
	}
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("run %s: %w", path, ctx.Err())
	case strings.Contains(complaint.String(), "holding the xtables lock"):
		return errLocked
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && complaint.Len() > 0 {
		return errors.New(errorText(complaint.String()))
	}
	return fmt.Errorf("run %s: %w", path, err)
}

// errLocked reports that another program held the lock all the time.
var errLocked = errors.New("another program holds the xtables lock")

// errorText joins a program's message into one line, without its advice.
func errorText(text string) string {
	var words []string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "Try `") || strings.HasPrefix(line, "# Warning") {
			continue
		}
		words = append(words, line)
	}
	return strings.Join(words, "; ")
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return line
}

// read reads one table, or all existing tables if table is "". It creates none.
func (p *programs) read(ctx context.Context, table string, seen func(chain, rule string)) ([]*dump, error) {
	var args []string
	if table != "" {
		args = []string{"-t", table}
	}
	pipe, feed := io.Pipe()
	var dumps []*dump
	parsed := make(chan error, 1)
	go func() {
		var err error
		dumps, err = readDump(pipe, seen)
		pipe.CloseWithError(err) // a writer of the rest must not wait
		parsed <- err
	}()
	err := p.stream(ctx, p.save, nil, feed, args...)
	feed.Close()
	if bad := <-parsed; err == nil {
		err = bad
	}
	if err != nil {
		return nil, fmt.Errorf("read rules: %s: %w", p.save, err)
	}
	return dumps, nil
}

// readTable reads one table.
func (p *programs) readTable(ctx context.Context, table string, seen func(chain, rule string)) (*dump, error) {
	dumps, err := p.read(ctx, table, seen)
	if err != nil {
		return nil, err
	}
	for _, d := range dumps {
		if d.table == table {
			return d, nil
		}
	}
	return &dump{table: table, chains: tableSums{}}, nil
}

// write passes differences to iptables-restore. Each table changes as a whole or not at
// all.
func (p *programs) write(ctx context.Context, diffs ...difference) error {
	var in bytes.Buffer
	for i := range diffs {
		switch d := &diffs[i]; {
		case d.empty():
		case p.variant == NFT && d.many() && d.have != nil:
			d.writeApart(&in)
		default:
			d.writeTo(&in)
		}
	}
	if in.Len() == 0 {
		return nil
	}
	_, err := p.run(ctx, p.restore, &in, "--noflush", "--wait", strconv.Itoa(p.cfg.lockWait()))
	if errors.Is(err, errLocked) {
		return fmt.Errorf("write rules: %s: %w%s for more than %ds", p.restore, err, p.cfg.lockHolder(), p.cfg.lockWait())
	}
	if err != nil {
		return fmt.Errorf("write rules: %s: %w", p.restore, err)
	}
	return nil
}

// writeTo writes the input of iptables-restore for one table, as one commit.
func (d *difference) writeTo(in *bytes.Buffer) {
	d.begin(in)
	for _, c := range d.fill {
		declare(in, c.name)
	}
	for _, name := range d.gone {
		declare(in, name)
	}
	d.edit(in)
	for i := range d.fill {
		d.fill[i].writeTo(in)
	}
	for _, name := range d.gone {
		in.WriteString("-X " + name + "\n")
	}
	in.WriteString("COMMIT\n")
}

// writeApart writes a table in commits that name each chain once, last name first. Only
// the second commit changes what is served. No rule jumps to the chains of the first
// commit yet, and none to the chains of the later commits any more.
func (d *difference) writeApart(in *bytes.Buffer) {
	fmt.Fprintf(in, "*%s\n", d.table)
	for _, c := range slices.Backward(d.fill) {
		if !d.have.has(c.name) {
			declare(in, c.name)
		}
	}
	in.WriteString("COMMIT\n")
	d.begin(in)
	d.edit(in)
	for _, c := range slices.Backward(d.fill) {
		declare(in, c.name)
		c.writeTo(in)
	}
	fmt.Fprintf(in, "COMMIT\n*%s\n", d.table)
	for _, name := range slices.Backward(d.gone) {
		declare(in, name)
	}
	fmt.Fprintf(in, "COMMIT\n*%s\n", d.table)
	for _, name := range slices.Backward(d.gone) {
		in.WriteString("-X " + name + "\n")
	}
	in.WriteString("COMMIT\n")
}

// begin starts the commit that changes what is served.
func (d *difference) begin(in *bytes.Buffer) {
	fmt.Fprintf(in, "*%s\n", d.table)
	for _, c := range d.check {
		in.WriteString(c + "\n")
	}
}

// edit changes the built-in chains, after the chains that they jump to exist.
func (d *difference) edit(in *bytes.Buffer) {
	for _, e := range d.edits {
		in.WriteString(e + "\n")
	}
}

func (c *chain) writeTo(in *bytes.Buffer) {
	for _, r := range c.rules {
		in.WriteString("-A " + c.name + " " + r + "\n")
	}
}

// declare creates or empties a chain.
func declare(in *bytes.Buffer, name string) { in.WriteString(":" + name + " - [0:0]\n") }

// manyChains is the number of chains from which on a sync writes them apart.
const manyChains = 256

// many reports whether so many chains change that their order matters to
// iptables-nft-restore. It keeps the names in a sorted list and searches each from the
// beginning (iptables 1.8.9, nft-cache.c). So the time of a commit grows with the square
// of the chains, unless they come last name first. That order needs the chains that rules
// jump to in the kernel already.
func (d *difference) many() bool { return len(d.fill)+len(d.gone) >= manyChains }

// rules returns the number of rules that a difference writes.
func (d *difference) rules() int {
	n := len(d.edits)
	for _, c := range d.fill {
		n += len(c.rules)
	}
	return n
}
