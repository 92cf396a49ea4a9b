// Package sysdump is the command that writes an archive for a bug report.
package sysdump

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/cluster"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/diagnosis/sysdump"
	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// config is the command line of `spillway sysdump`.
type config struct {
	cluster.Access
	pins             cli.Pins
	api              nodeclient.Socket
	file             string
	objects          bool
	node, fromAPI    bool
	limitMiB         int
	metrics, healthz string
	agentNamespace   string
	output           cli.Output
}

// NewCommand returns the command sysdump.
func NewCommand() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "sysdump",
		Short: "Write an archive with the state of this node and of the cluster, for a bug report",
		Long: `Writes one archive with everything that a bug report needs. From this node: versions,
flags, health, metrics, 'spillway doctor', maps, Spillway's own rules, sysctls, links, the
agent's log, and its state. From the cluster, if a kubeconfig or the Pod's account gives
access: the agents' Pods, logs and states, Events, Nodes, and numbers of objects.

Passwords, tokens, private keys and values of environments are removed. The archive still
has addresses and names of the cluster: look at it before you send it. A part that cannot
be read is listed in index.json, and ends nothing. Run it as root: other users read less.`,
		Example: `  spillway sysdump
  spillway sysdump --objects --file /tmp/bug.tar.gz
  spillway sysdump --node=false --context staging`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.validate(cmd); err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			return c.run(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&c.file, "file", "", "Archive `file` to write (default: spillway-sysdump-HOST-TIME.tar.gz in this directory).")
	f.BoolVar(&c.node, "node", true, "Collect from this node.")
	f.BoolVar(&c.fromAPI, "cluster", true, "Collect from the cluster.")
	f.BoolVar(&c.objects, "objects", false, "Include all Services and EndpointSlices, without annotations.")
	f.IntVar(&c.limitMiB, "max-size", sysdump.DefaultLimit>>20, "Most `MiB` of content, before it is compressed.")
	f.StringVar(&c.metrics, "metrics-address", "127.0.0.1:10249", "Address of the agent's metrics.")
	f.StringVar(&c.healthz, "healthz-address", "127.0.0.1:10256", "Address of the agent's health checks.")
	c.pins.AddFlag(f, "Directory of the agent's pins.")
	c.api.AddFlag(f)
	c.output.AddFlag(cmd)
	c.AddFlags(cmd)
	reach.AddNamespace(f, &c.agentNamespace)
	return cmd
}

func (c *config) validate(cmd *cobra.Command) error {
	if err := c.output.Validate(); err != nil {
		return err
	}
	if err := cli.NotEmpty(cmd.Flags(), "file", "metrics-address", "healthz-address", "agent-namespace"); err != nil {
		return err
	}
	switch {
	case !c.node && !c.fromAPI:
		return cli.UsageErrorf("--node=false --cluster=false: nothing is left to collect")
	case c.objects && !c.fromAPI:
		return cli.UsageErrorf("--objects --cluster=false: objects are the cluster's")
	case c.limitMiB < 1 || c.limitMiB > 1024:
		return cli.UsageErrorf("--max-size %d: use 1 to 1024", c.limitMiB)
	}
	return nil
}

func (c *config) run(ctx context.Context, out, stderr io.Writer) error {
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("write archive: %w", err)
	}
	now := time.Now()
	name := fmt.Sprintf("spillway-sysdump-%s-%s", host, now.UTC().Format("20060102-150405"))
	shown := progress.New(stderr)
	shown.Step("spillway: collecting")
	defer shown.Done()
	archive := sysdump.Config{Name: name, Version: cli.Build().Version, Time: now, Limit: c.limitMiB << 20, Part: shown.Part}
	if archive.Collectors, archive.Redactor, err = c.collectors(ctx); err != nil {
		return err
	}
	file := cmp.Or(c.file, name+".tar.gz")
	index, size, err := writeFile(ctx, file, archive)
	shown.Done()
	if err != nil {
		return err
	}
	return c.output.Print(out, &result{File: file, Name: name, Bytes: size, Index: index})
}

// Directories of the machine; tests replace them.
var (
	procDir = "/proc"
	logDir  = "/var/log/pods"
)

// collectors returns all that were requested, and what removes secrets. Without access to the
// cluster, one collector says so in the index. An error is that secrets cannot be known.
func (c *config) collectors(ctx context.Context) ([]sysdump.Collector, *sysdump.Redactor, error) {
	here := &node{
		proc: procDir, logs: logDir, pins: c.pins.Dir(), metrics: c.metrics, healthz: c.healthz, api: &c.api,
		agentNamespace: cmp.Or(c.agentNamespace, reach.UsualNamespace),
	}
	known, err := here.secrets(ctx)
	if err != nil {
		return nil, nil, err
	}
	config, noAccess := c.Config()
	if noAccess == nil {
		known = append(known, config.BearerToken, config.Password, string(config.KeyData))
	}
	redactor := sysdump.NewRedactor(known...)
	here.redactor = redactor
	var list []sysdump.Collector
	if c.node {
		list = here.collectors()
	}
	if !c.fromAPI {
		return list, redactor, nil
	}
	from, err := c.cluster(redactor)
	if err != nil {
		failed := func(context.Context, io.Writer) error { return err }
		return append(list, sysdump.Collector{File: "cluster", About: "everything of the cluster", Collect: failed}), redactor, nil
	}
	here.pods = from.reach.Pods
	return append(list, from.collectors(ctx)...), redactor, nil
}

// cluster connects to the API server. It sends no request.
func (c *config) cluster(redactor *sysdump.Redactor) (*fromCluster, error) {
	client, err := c.Connect()
	if err != nil {
		return nil, err
	}
	config, err := c.Config()
	if err != nil {
		return nil, err
	}
	config.Timeout = 0 // a connection to an agent is one request
	agents, err := reach.New(reach.Config{REST: config, Namespace: c.agentNamespace})
	if err != nil {
		return nil, err
	}
	return &fromCluster{client, agents, redactor, c.objects}, nil
}

// writeFile writes the archive to a new file, which other users cannot read. With an error it
// leaves none.
func writeFile(ctx context.Context, file string, archive sysdump.Config) (*sysdump.Index, int64, error) {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil, 0, fmt.Errorf("write archive: %s exists: remove it, or give another --file", file)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("write archive: %w: give another --file", err)
	}
	index, err := sysdump.Write(ctx, f, archive)
	info, statErr := f.Stat()
	if err := errors.Join(err, statErr, f.Close()); err != nil {
		_ = os.Remove(file)
		return nil, 0, err
	}
	return index, info.Size(), nil
}

// result is the result of the command.
type result struct {
	File  string         `json:"file"`
	Name  string         `json:"directory"`
	Bytes int64          `json:"bytes"`
	Index *sysdump.Index `json:"index"`
}

// Write prints what was written and what was not.
func (r *result) Write(w io.Writer) error {
	p := page.Of(w)
	t := page.NewTable(page.Text("FILE"), page.Number("KIB"), page.Text("CONTENT").Shrinks(20))
	for _, e := range r.Index.Files {
		about := e.About
		switch {
		case e.Error != "":
			about = "not read: " + e.Error
			if e.Bytes > 0 {
				about = e.About + "; incomplete: " + e.Error
			}
		case e.Cut:
			about += "; cut at the size limit"
		}
		t.Row(e.File, (e.Bytes+1023)/1024, about)
	}
	t.Foot("")
	failed := len(r.Index.Failed())
	style, incomplete := page.Good, ""
	if failed > 0 {
		style, incomplete = page.Warning, fmt.Sprintf("; %d parts could not be read completely", failed)
	}
	t.Verdict(style, "written", "%s, %d KiB, %d files%s", escape.Text(r.File), (r.Bytes+1023)/1024, r.files(), incomplete)
	t.Foot("")
	t.Foot("Look at it before you send it. It has addresses, names of Pods, nodes and namespaces, and logs:")
	if err := t.Write(p); err != nil {
		return err
	}
	// Lines to copy are not broken.
	file := escape.Shell(filepath.Clean(r.File))
	_, err := fmt.Fprintf(p, "  tar -tzf %[1]s\n  tar -xzOf %[1]s | less\n", file)
	return err
}

// files returns the number of files in the archive, with the index.
func (r *result) files() int {
	n := 1
	for _, e := range r.Index.Files {
		if e.Bytes > 0 {
			n++
		}
	}
	return n
}
