package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"spillway.dev/spillway/test/cluster/images"
	"spillway.dev/spillway/test/cluster/programs"
)

// Prepared names the files that a cluster is made of.
type Prepared struct {
	Programs string   // directory of hack/peers' programs
	Archives []string // images that every node imports
}

// Prepare builds and downloads what a cluster needs and the machine lacks. The first time
// takes many minutes; it writes lines about its progress to cfg.Out. It may need the
// machine's own network. Up needs no network after it.
func Prepare(ctx context.Context, cfg Config) (*Prepared, error) {
	cfg = cfg.WithDefaults()
	image, err := cfg.FindImage() // first: the rest takes long
	if err != nil {
		return nil, err
	}
	var p Prepared
	// Those of images too: one build of many programs takes less time than two.
	all := append(cfg.needed(), images.Programs(cfg.images()...)...)
	if p.Programs, err = programs.Build(ctx, cfg.Out, all...); err != nil {
		return nil, err
	}
	if p.Archives, err = images.Build(ctx, cfg.Out, cfg.images()...); err != nil {
		return nil, err
	}
	p.Archives = append(p.Archives, image)
	return &p, nil
}

// needed names the programs that run outside of containers.
func (cfg Config) needed() []string {
	names := []string{"helm", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet"}
	if cfg.Kubeadm {
		names = append(names, "kubeadm")
	}
	return names
}

// images names the images that every node imports, beside Spillway's.
func (cfg Config) images() []string {
	names := append([]string{"pause", "coredns"}, cfg.Images...)
	if cfg.Kubeadm {
		names = append(names, images.Kubeadm...)
	}
	if cfg.CNI != Bridge {
		names = append(names, images.Flannel...)
	}
	if cfg.Proxy != Spillway {
		names = append(names, "kube-proxy")
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// check returns an error that names a missing file.
func (p *Prepared) check(cfg Config) error {
	files := slices.Clone(p.Archives)
	for _, name := range cfg.needed() {
		files = append(files, filepath.Join(p.Programs, name))
	}
	for _, file := range files {
		if _, err := os.Stat(file); err != nil {
			return fmt.Errorf("find what was prepared: %w: run \"spillway-cluster up\" again", err)
		}
	}
	return nil
}
