package main

import (
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"spillway.dev/spillway/hack/image"
	"spillway.dev/spillway/hack/image/debian"
)

// lockFile has the packages of the image for each architecture.
const lockFile = "build/packages.json"

//go:embed packages.json
var lockText []byte

// wanted are the packages with the programs and files of the image.
var wanted = []string{"base-files", "iptables", "kmod", "nftables"}

// programs are the files that the image takes out of packages. Each comes with the
// shared libraries that it needs.
var programs = []string{
	// For proxyMode iptables, to remove rules of other modes, and for doctor.
	"/usr/sbin/iptables-legacy*", "/usr/sbin/ip6tables-legacy*",
	"/usr/sbin/iptables-nft*", "/usr/sbin/ip6tables-nft*",
	// All modules: iptables-save fails at a rule of another program whose module is missing.
	"/usr/lib/*/xtables/libxt_*.so", "/usr/lib/*/xtables/libipt_*.so", "/usr/lib/*/xtables/libip6t_*.so",
	// For doctor, and to look at the rules of a node.
	"/usr/sbin/nft",
	// For loadModules.
	"/sbin/modprobe",
	// For scanners: which Debian the packages are of.
	"/etc/os-release",
}

// links are what maintainer scripts make: the nft variant is Debian's default.
var links = map[string]string{
	"iptables": "iptables-nft", "iptables-save": "iptables-nft-save", "iptables-restore": "iptables-nft-restore",
	"ip6tables": "ip6tables-nft", "ip6tables-save": "ip6tables-nft-save", "ip6tables-restore": "ip6tables-nft-restore",
}

// toolsOf returns the image's files out of packages, and those packages. They are the
// locked ones. If no repository has one of those any more, they are the current ones, with a
// line about each that differs, unless the lock is binding.
func toolsOf(ctx context.Context, arch string, binding bool) (*image.Tree, []debian.Package, error) {
	var lock map[string][]debian.Package
	if err := json.Unmarshal(lockText, &lock); err != nil {
		return nil, nil, fmt.Errorf("read %s: %w", lockFile, err)
	}
	locked := lock[arch]
	if len(locked) == 0 {
		return nil, nil, fmt.Errorf("read %s: no packages for %s: run make image-lock", lockFile, arch)
	}
	files, used, err := choose(ctx, locked)
	if !errors.Is(err, debian.ErrUnavailable) {
		return files, used, err
	}
	if binding {
		return nil, nil, fmt.Errorf("a release has the packages of hack/image/%s alone: run make image-lock and commit the file: %w", lockFile,
			err)
	}
	return chooseCurrent(ctx, arch, locked, err)
}

// chooseCurrent is choose for the current versions of the packages. failed is the error of
// the locked ones, which remains if they are the current ones.
func chooseCurrent(ctx context.Context, arch string, locked []debian.Package, failed error) (*image.Tree, []debian.Package, error) {
	current, err := debian.Resolve(ctx, arch, wanted...)
	if err != nil {
		return nil, nil, fmt.Errorf("%w; find its current version: %w", failed, err)
	}
	files, used, err := choose(ctx, current)
	if err != nil {
		return nil, nil, err
	}
	versions := map[string]string{}
	for _, p := range locked {
		versions[p.Name] = p.Version
	}
	different := slices.DeleteFunc(slices.Clone(used), func(p debian.Package) bool { return versions[p.Name] == p.Version })
	if len(different) == 0 {
		return nil, nil, failed
	}
	for _, p := range different {
		fmt.Fprintf(notices, "build image: %s: package %s: locked version %s, used version %s: run make image-lock\n",
			arch, p.Name, cmp.Or(versions[p.Name], "none"), p.Version)
	}
	return files, used, nil
}

// notices gets lines about packages that are not the locked ones.
var notices io.Writer = os.Stderr

// choose returns the image's files out of packages, and those packages that have one of
// them, or the copyright file of such a package.
func choose(ctx context.Context, packages []debian.Package) (*image.Tree, []debian.Package, error) {
	all, of := image.NewTree(), map[string]*image.Tree{}
	for _, p := range packages {
		t, err := debian.Tree(ctx, []debian.Package{p})
		if err != nil {
			return nil, nil, err
		}
		of[p.Name] = t
		all.Merge(t)
	}
	files := image.NewTree()
	if err := files.AddPrograms(all, programs...); err != nil {
		return nil, nil, err
	}
	names := files.Names()
	needed := map[string]bool{}
	for _, p := range packages {
		has := of[p.Name].Names()
		if !slices.ContainsFunc(names, func(n string) bool { _, found := slices.BinarySearch(has, n); return found }) {
			continue
		}
		in, err := p.CopyrightIn(ctx)
		if err != nil {
			return nil, nil, err
		}
		if of[in] == nil {
			return nil, nil, fmt.Errorf("package %s: its copyright file is in package %s, which %s lacks: run make image-lock", p.Name, in, lockFile)
		}
		needed[p.Name], needed[in] = true, true
	}
	var used []debian.Package
	for _, p := range packages {
		if !needed[p.Name] {
			continue
		}
		used = append(used, p)
		license := "/usr/share/doc/" + p.Name
		if _, link := slices.BinarySearch(of[p.Name].Names(), license); !link { // to another package's directory
			license += "/copyright"
		}
		if err := files.Take(of[p.Name], license, "/var/lib/dpkg/status.d/*"); err != nil {
			return nil, nil, fmt.Errorf("package %s: %w", p.Name, err)
		}
	}
	for name, target := range links {
		files.Link("/usr/sbin/"+name, target)
	}
	return files, used, nil
}

// writeLock writes the file with the current versions of the packages that the image
// takes files from.
func writeLock(ctx context.Context) error {
	lock := map[string][]debian.Package{}
	for _, arch := range architectures {
		all, err := debian.Resolve(ctx, arch, wanted...)
		if err != nil {
			return err
		}
		if _, lock[arch], err = choose(ctx, all); err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
	}
	text, err := json.MarshalIndent(lock, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(lockFile, append(text, '\n'), 0o644)
}
