package topology

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Option changes how Up works.
type Option func(*builder)

// WithProgress makes Up report each step before it starts.
func WithProgress(report func(step string)) Option {
	return func(b *builder) { b.progress = report }
}

// builder creates a cluster. Every step creates missing objects and keeps correct ones,
// so that Up can be repeated after any interruption.
type builder struct {
	c        *Cluster
	progress func(string)
	networks map[string]*network // by host name, "lan" included
}

type step struct {
	name string
	do   func(context.Context) error
}

// Up creates a cluster, or repairs an existing one with the same Spec. If it cannot
// complete a new cluster, it removes it.
func Up(ctx context.Context, spec Spec, opts ...Option) (*Cluster, error) {
	if err := RequireRoot(); err != nil {
		return nil, err
	}
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	unlock, err := lock(ctx, spec.Name)
	if err != nil {
		return nil, err
	}
	defer unlock()
	c, existed, err := prepare(spec.withDefaults())
	if err != nil {
		return nil, err
	}
	b := newBuilder(c, opts...)
	defer b.close()
	if err := b.run(ctx, b.steps()); err != nil {
		if !existed {
			err = errors.Join(err, down(context.WithoutCancel(ctx), spec.Name))
		}
		return nil, fmt.Errorf("bring up lab cluster %q: %w", spec.Name, err)
	}
	return c, nil
}

// RequireRoot returns an error unless the process may create namespaces.
func RequireRoot() error {
	if os.Geteuid() != 0 {
		return errors.New("make network namespaces: not root: run it as root")
	}
	return nil
}

// prepare finds the existing cluster, or plans a new one.
func prepare(spec Spec) (c *Cluster, existed bool, err error) {
	have, err := Load(spec.Name)
	if err == nil {
		if diff := difference(have.Spec, spec); diff != "" {
			return nil, true, fmt.Errorf("bring up lab cluster %q: it exists with another spec (%s): run \"spillway-lab lab down --name %s\" first",
				spec.Name, diff, spec.Name)
		}
		return have, true, nil
	}
	if !errors.Is(err, ErrNoCluster) {
		return nil, true, err
	}
	root, err := clusterCgroup(spec.Name)
	if err != nil {
		_ = os.Remove(stateDir(spec.Name)) // created for the lock alone
		return nil, false, err
	}
	return newCluster(spec, root), false, nil
}

func newBuilder(c *Cluster, opts ...Option) *builder {
	b := &builder{c: c, progress: func(string) {}, networks: map[string]*network{}}
	for _, o := range opts {
		o(b)
	}
	return b
}

func (b *builder) steps() []step {
	steps := []step{
		// First of all: whatever happens from here on, Down knows about it.
		{"write state", func(context.Context) error { return b.c.writeState(StatusCreating) }},
		{"create cgroups", b.createCgroups},
		{"create namespaces", b.createNamespaces},
		{"connect LAN", b.connectLAN},
	}
	if b.c.Spec.PodNetwork != None {
		steps = append(steps, step{"connect pods", b.connectPods}, step{"route pod network", b.routePods})
	}
	return append(steps,
		step{"load netfilter rules", b.loadNetfilter},
		step{"write state", func(context.Context) error { return b.c.writeState(StatusUp) }},
	)
}

func (b *builder) run(ctx context.Context, steps []step) error {
	for _, s := range steps {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		b.progress(s.name)
		if err := s.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

func (b *builder) close() {
	for _, n := range b.networks {
		n.close()
	}
}

func (b *builder) createCgroups(context.Context) error {
	for _, h := range b.c.Hosts() {
		if err := makeDir(h.Cgroup); err != nil {
			return fmt.Errorf("create cgroup: %w", err)
		}
	}
	return nil
}

// lanName is the name, among the hosts, of the namespace of the LAN's bridge.
const lanName = "lan"

func (b *builder) createNamespaces(ctx context.Context) error {
	if err := ensureNamespaceDir(); err != nil {
		return err
	}
	if err := b.createNamespace(lanName, false); err != nil {
		return err
	}
	for _, h := range b.c.Hosts() {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := b.createNamespace(h.Name, h.Kind == KindNode); err != nil {
			return err
		}
	}
	return nil
}

func (b *builder) createNamespace(host string, forwards bool) error {
	name := namespaceName(b.c.Spec.Name, host)
	if err := ensureNamespace(name); err != nil {
		return err
	}
	err := inNamespace(name, func() error { return b.c.Spec.writeSysctls(forwards) })
	if err != nil {
		return fmt.Errorf("set up namespace %s: %w", name, err)
	}
	n, err := openNetwork(name, b.c.Spec)
	if err != nil {
		return err
	}
	b.networks[host] = n
	return n.up("lo")
}

// writeSysctls sets the sysctls of the calling thread's namespace: in /proc/sys/net each
// thread sees its own. It must run before the first interface, which inherits from
// "default".
func (s Spec) writeSysctls(forwards bool) error {
	set := map[string]string{}
	for _, scope := range []string{"all", "default"} {
		set["ipv4/conf/"+scope+"/rp_filter"] = fmt.Sprint(s.RPFilter)
		// A node redirects who asks for an address that it does not serve yet. A client that
		// believes it avoids the node for minutes.
		set["ipv4/conf/"+scope+"/accept_redirects"] = "0"
		if s.IPv6 {
			// No duplicate address detection: addresses are usable at once.
			set["ipv6/conf/"+scope+"/accept_dad"] = "0"
			set["ipv6/conf/"+scope+"/accept_ra"] = "0"
			set["ipv6/conf/"+scope+"/accept_redirects"] = "0"
		}
	}
	if forwards {
		set["ipv4/ip_forward"] = "1"
		if s.IPv6 {
			set["ipv6/conf/all/forwarding"] = "1"
		}
	}
	for key, value := range set {
		if err := os.WriteFile("/proc/sys/net/"+key, []byte(value), 0); err != nil {
			return fmt.Errorf("set sysctl net/%s=%s: %w", key, value, err)
		}
	}
	return nil
}

// isNotFound reports whether an error of the kernel means a missing object.
func isNotFound(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ESRCH)
}
