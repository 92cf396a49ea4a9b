package reach

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/exec"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/escape"
)

// ForClient is the hidden word before a command that runs in the agent's container for a client. The
// command then ends when its standard input does: the kubelet lets an exec run on after its client.
const ForClient = "for-client"

// Run runs a command of this machine on the chosen nodes, in the agents' containers, and prints what
// it prints with the node of each line. Flags of the cluster and those in skip are not passed on.
// Viewers have no right to this: it is an exec of another command than api-pipe.
func (f *Flags) Run(ctx context.Context, cmd *cobra.Command, output cli.Output, skip ...string) error {
	nodes, err := f.Chosen(cmd)
	if err != nil {
		return err
	}
	does := "run " + cmd.Name()
	agents, _, err := nodes.Asked(ctx, does, noteTo(cmd.ErrOrStderr()))
	if err != nil {
		return err
	}
	r := runner{cluster: nodes.Cluster, args: append([]string{"spillway", ForClient, cmd.Name()}, passedOn(cmd.Flags(), skip)...),
		out: cmd.OutOrStdout(), notes: cmd.ErrOrStderr(), output: output, several: len(agents) > 1}
	if output.ForPrograms() {
		r.args = append(r.args, "--output=json")
	}
	for _, a := range agents {
		r.widest = max(r.widest, len(escape.Text(a.Node)))
	}
	failed := make([]*Error, len(agents))
	var group errgroup.Group // all at once: a command may run until it is interrupted
	for i, a := range agents {
		group.Go(func() error {
			failed[i] = r.run(ctx, a)
			return nil
		})
	}
	_ = group.Wait()
	silent := 0
	for i, err := range failed {
		if err != nil && ctx.Err() == nil {
			r.note(agents[i].Node, err.Error())
			silent++
		}
	}
	return Missing(does, silent, len(agents))
}

// passedOn returns the flags of a command line that the command gets on the node.
func passedOn(flags *pflag.FlagSet, skip []string) (args []string) {
	skipped := map[string]bool{"output": true}
	for _, name := range skip {
		skipped[name] = true
	}
	flags.Visit(func(f *pflag.Flag) {
		values := []string{f.Value.String()}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			values = list.GetSlice()
		}
		if skipped[f.Name] || cli.GroupOf(f) == Group {
			return
		}
		for _, v := range values {
			args = append(args, "--"+f.Name+"="+v)
		}
	})
	if f := flags.Lookup("output"); f != nil && f.Value.String() == string(cli.Wide) {
		args = append(args, "--output=wide")
	}
	return args
}

// runner prints what a command prints on nodes.
type runner struct {
	cluster *Cluster
	args    []string
	output  cli.Output
	several bool // name the node of each line
	widest  int  // name of a node

	mu         sync.Mutex
	out, notes io.Writer
}

// run runs the command on a node until it ends.
func (r *runner) run(ctx context.Context, a Agent) *Error {
	if a.Err != nil {
		return Explain(ctx, a.Err)
	}
	e, err := r.cluster.executor(a, r.args)
	if err != nil {
		return Explain(ctx, err)
	}
	stdout, printed := io.Pipe()
	var reading sync.WaitGroup
	reading.Go(func() {
		err := r.print(a.Node, stdout)
		stdout.CloseWithError(err)
	})
	said := &lines{each: func(line string) { r.note(a.Node, strings.TrimPrefix(line, "spillway: ")) }}
	stdin, open := io.Pipe() // its end is the command's
	defer open.Close()
	err = e.StreamWithContext(quietly(ctx), remotecommand.StreamOptions{Stdin: stdin, Stdout: printed, Stderr: said})
	printed.Close()
	reading.Wait()
	said.flush()
	return r.explain(a, err)
}

// explain returns why the command failed on a node; nil if it did not.
func (r *runner) explain(a Agent, err error) *Error {
	var exit exec.CodeExitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &exit) && exit.Code == exitUsage:
		return &Error{TooOld, "its agent's program does not know this command line: it is of another version than this program"}
	case errors.As(err, &exit):
		return &Error{Failed, fmt.Sprintf("the command failed there, with exit code %d", exit.Code)}
	case apierrors.IsForbidden(err):
		return &Error{Forbidden, fmt.Sprintf("you may not exec 'spillway %s' in the agents' Pods of namespace %s, as viewers may not: "+
			"run it on the node", r.args[2], escape.Text(a.Namespace))}
	}
	return explainExec(err, "", a)
}

// note prints a line about a node for people.
func (r *runner) note(node, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(r.notes, "spillway: node %s: %s\n", escape.Text(node), escape.Text(text))
}

// print prints what the command prints on a node.
func (r *runner) print(node string, from io.Reader) error {
	if r.output.ForPrograms() {
		return r.documents(node, json.NewDecoder(from))
	}
	in := bufio.NewScanner(from)
	in.Buffer(nil, maxLine)
	for in.Scan() {
		line := escape.Text(in.Text())
		if r.several {
			line = fmt.Sprintf("%-*s  %s", r.widest, escape.Text(node), line)
		}
		if err := r.write(strings.TrimRight(line, " ") + "\n"); err != nil {
			return err
		}
	}
	return in.Err()
}

// maxLine is the longest line that is printed, in bytes.
const maxLine = 1 << 20

func (r *runner) write(text string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, err := io.WriteString(r.out, text)
	return err
}

// documents prints JSON: of several nodes as objects with the key node, and arrays as rows.
func (r *runner) documents(node string, from *json.Decoder) error {
	for {
		var one json.RawMessage
		if err := from.Decode(&one); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read JSON of node %s: %w", escape.Text(node), err)
		}
		if r.several {
			of, err := json.Marshal(node)
			if err != nil {
				return err
			}
			object := fmt.Sprintf(`{"node":%s,"rows":%s}`, of, one)
			if fields, is := bytes.CutPrefix(one, []byte("{")); is {
				object = fmt.Sprintf(`{"node":%s,%s`, of, fields)
			}
			one = json.RawMessage(object)
		}
		if err := r.document(one); err != nil {
			return err
		}
	}
}

func (r *runner) document(one json.RawMessage) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.output.Encode(r.out, one, "")
}

// lines calls each with every line that is written.
type lines struct {
	rest []byte
	each func(string)
}

func (l *lines) Write(text []byte) (int, error) {
	l.rest = append(l.rest, text...)
	for {
		line, rest, found := bytes.Cut(l.rest, []byte("\n"))
		if !found && len(l.rest) < maxLine {
			return len(text), nil
		}
		l.each(string(line))
		l.rest = bytes.Clone(rest)
	}
}

func (l *lines) flush() {
	if len(l.rest) > 0 {
		l.each(string(l.rest))
	}
}
