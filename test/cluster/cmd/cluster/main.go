// Command cluster starts and stops a real Kubernetes cluster on this machine.
// docs/contributing/real-clusters.md describes it.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/topology"
)

const usage = `Usage: spillway-cluster COMMAND [-name NAME] …

  up       start a cluster, with the CNI, the proxy and CoreDNS installed
  down     remove it
  status   list its nodes and Pods
  kubectl  run kubectl with full rights, on a host outside the cluster
  helm     run Helm there
  exec     run a program on a host: client0, or a node's network namespace

Flags of up:
`

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "spillway-cluster:", err)
		code := 1
		if errors.Is(err, errUsage) {
			code = 2
		}
		os.Exit(code)
	}
}

var errUsage = errors.New("wrong usage")

func run(args []string) error {
	var cfg cluster.Config
	var values stringList
	flags := flag.NewFlagSet("spillway-cluster", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&cfg.Name, "name", cluster.DefaultName, "name of the cluster")
	flags.IntVar(&cfg.Nodes, "nodes", 3, "number of nodes")
	flags.StringVar((*string)(&cfg.CNI), "cni", string(cluster.FlannelVXLAN), fmt.Sprintf("pod network: one of %q", cluster.CNIs))
	flags.StringVar((*string)(&cfg.Proxy), "proxy", string(cluster.Spillway), fmt.Sprintf("proxy: one of %q", cluster.Proxies))
	flags.StringVar((*string)(&cfg.Families), "families", string(cluster.IPv4),
		fmt.Sprintf("address families: one of %q", cluster.AllFamilies))
	flags.BoolVar(&cfg.Kubeadm, "kubeadm", false, "make the control plane and the nodes with kubeadm")
	flags.StringVar(&cfg.Image, "image", "", "archive of Spillway's image (default bin/image.tar)")
	flags.DurationVar(&cfg.Wait, "wait", 3*time.Minute, "how long each thing that starts may take")
	flags.Var(&values, "set", "value of Spillway's chart, NAME=VALUE; may be repeated")
	if len(args) == 0 || args[0] == "help" || args[0] == "-h" || args[0] == "--help" {
		fmt.Print(usage)
		flags.SetOutput(os.Stdout)
		flags.PrintDefaults()
		return nil
	}
	switch args[0] {
	case "kubectl", "helm", "exec":
		name, rest := clusterName(args[1:])
		if args[0] == "exec" {
			return onHost(name, rest)
		}
		return onClient(name, args[0], rest...)
	}
	if err := flags.Parse(args[1:]); err != nil {
		return fmt.Errorf("%w: %w: run \"spillway-cluster help\"", errUsage, err)
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%w: %q: only kubectl, helm and exec take arguments; name a cluster by -name NAME", errUsage, flags.Arg(0))
	}
	if cfg.Nodes < 1 {
		return fmt.Errorf("%w: -nodes %d: must be 1 or more", errUsage, cfg.Nodes)
	}
	cfg.Values = values
	cfg.Images = []string{"agnhost"}
	switch args[0] {
	case "up":
		return up(cfg, args[1:])
	case "serve": // up runs it
		return serve(cfg)
	case "down":
		return cluster.Down(cfg.Name)
	case "status":
		return onClient(cfg.Name, "kubectl", "get", "nodes,pods", "--all-namespaces", "--output=wide")
	}
	return fmt.Errorf("%w: no command %q: run \"spillway-cluster help\"", errUsage, args[0])
}

// clusterName takes the name of the cluster from the front of arguments. The rest belongs to
// another program.
func clusterName(args []string) (name string, rest []string) {
	if len(args) > 0 {
		flag, value, has := strings.Cut(args[0], "=")
		switch {
		case strings.TrimLeft(flag, "-") != "name":
		case has:
			return value, args[1:]
		case len(args) > 1:
			return args[1], args[2:]
		}
	}
	return cluster.DefaultName, args
}

// stringList is a flag that may be repeated.
type stringList []string

func (l *stringList) String() string { return strings.Join(*l, " ") }

// Set adds a value.
func (l *stringList) Set(value string) error {
	*l = append(*l, value)
	return nil
}

// up starts this program again on the cluster's client, to run the cluster in the
// background, and reports its steps until all is up. Down ends it with the rest. The client
// reaches no other network, so up prepares everything first.
func up(cfg cluster.Config, args []string) error {
	if err := cfg.WithDefaults().Validate(); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if c, err := topology.Load(cfg.Name); err == nil {
		return fmt.Errorf("cluster %s exists since %s: run \"spillway-cluster down -name %s\" first", cfg.Name, c.Created.Local(), cfg.Name)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	cfg.Out = os.Stdout
	fmt.Println("prepare programs and images")
	prepared, err := cluster.Prepare(ctx, cfg)
	if err != nil {
		return err
	}
	stop()
	return start(cfg, args, prepared)
}

// start makes the cluster's network and runs serve in it.
func start(cfg cluster.Config, args []string, prepared *cluster.Prepared) error {
	input, err := json.Marshal(prepared)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	lan, err := cluster.Create(context.Background(), cfg)
	if err != nil {
		return err
	}
	steps, report, err := os.Pipe()
	if err != nil {
		return err
	}
	defer steps.Close()
	cmd := lan.Client(0).Command(context.Background(), append([]string{self, "serve"}, args...)...)
	cmd.Stdin = bytes.NewReader(input)
	cmd.ExtraFiles = []*os.File{report} // descriptor 3
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	report.Close()
	last := ""
	for lines := bufio.NewScanner(steps); lines.Scan(); {
		last = lines.Text()
		fmt.Println(last)
	}
	if last != isUp {
		return fmt.Errorf("cluster %s did not start: logs are in %s; \"spillway-cluster down -name %s\" removes it",
			cfg.Name, cluster.Dir(cfg.Name), cfg.Name)
	}
	return nil
}

const isUp = "up"

// serve runs a cluster until it gets a signal. Its input is what up prepared.
func serve(cfg cluster.Config) error {
	if err := json.NewDecoder(os.Stdin).Decode(&cfg.Prepared); err != nil {
		return fmt.Errorf("read what was prepared: %w: run \"spillway-cluster up\"", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	syscall.CloseOnExec(3) // up reads until it is closed everywhere
	report := os.NewFile(3, "report")
	cfg.Out = report
	c, err := cluster.Up(ctx, cfg)
	if err != nil {
		fmt.Fprintln(report, err)
	} else {
		fmt.Fprintln(report, isUp)
	}
	report.Close()
	<-ctx.Done()
	c.Stop()
	return nil
}

// onClient becomes kubectl or helm on the client.
func onClient(name, program string, args ...string) error {
	path, err := controlplane.Program(program)
	if err != nil {
		return err
	}
	return onHost(name, append([]string{"client0", path}, args...))
}

// onHost becomes a program on a host of the cluster.
func onHost(name string, argv []string) error {
	if len(argv) < 2 {
		return fmt.Errorf("%w: exec needs a host and a program", errUsage)
	}
	c, err := topology.Load(name)
	if err != nil {
		return err
	}
	host, err := c.Find(argv[0])
	if err != nil {
		return err
	}
	if _, err := exec.LookPath(argv[1]); err != nil {
		return err
	}
	if err := os.Setenv("KUBECONFIG", cluster.Kubeconfig(name)); err != nil {
		return err
	}
	return host.Exec(argv[1:])
}
