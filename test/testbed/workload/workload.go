// Package workload holds the servers that run in a lab cluster's hosts, and the request
// that shows which of them answered.
//
// A server must be a process of its own, in its host's cgroup, so that cgroup socket
// hooks see it. Start runs the calling executable again; its main (or TestMain) calls
// RunIfAsked first.
package workload

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"
)

// The kinds of server.
const (
	HTTP = "http" // nginx
	DNS  = "dns"  // answers questions for A and AAAA records
	UDP  = "udp"  // answers each datagram with "NAME CLIENT-ADDRESS PAYLOAD"
	TCP  = "tcp"  // greets with "NAME CLIENT-ADDRESS\n", then echoes
	TFTP = "tftp" // reads of any file name succeed, writes are accepted and discarded
	// Blocks is TFTP for measurements: reads without options, without a memory.
	Blocks = "tftp-blocks"
	// Memcached is memcached, with one thread.
	Memcached = "memcached"
	// The programs of examples/rtb.
	Exchange = "exchange"
	DSP      = "dsp"
)

// Config configures a server.
type Config struct {
	Kind string `json:"kind"`
	// Listen is the port to listen on, in both families (":80"), or one
	// address and port.
	Listen string `json:"listen"`
	Name   string `json:"name"` // its name in answers
	// Size is the length of an HTTP body or of a TFTP file in bytes; 0 is as
	// long as the name needs, and 5120 for TFTP.
	Size int `json:"size,omitempty"`
	// Stream makes a TCP server send numbered lines, one each Interval (0: 10 ms),
	// instead of echoing.
	Stream   bool          `json:"stream,omitempty"`
	Interval time.Duration `json:"interval,omitempty"`
	// Dir is the parent of the directory of nginx's files; "" is the directory that the
	// lab names, or the system's.
	Dir string `json:"dir,omitempty"`
	// Exchange is the address at which a DSP registers; Self is its own address for bid
	// requests.
	Exchange string `json:"exchange,omitempty"`
	Self     string `json:"self,omitempty"`
	// Ready is called once when the server listens.
	Ready func() `json:"-"`
}

func (c Config) ready() {
	if c.Ready != nil {
		c.Ready()
	}
}

var nameRule = regexp.MustCompile(`^[-._0-9A-Za-z]{1,100}$`)

// Validate returns an error of one line for an invalid Config.
func (c Config) Validate() error {
	switch c.Kind {
	case HTTP, DNS, UDP, TCP, TFTP, Blocks, Memcached, Exchange:
	case DSP:
		if c.Exchange == "" || c.Self == "" {
			return errors.New("serve: a dsp needs the URL of an exchange's /register and its own for bids")
		}
	default:
		return fmt.Errorf("serve: kind %q is none of http, dns, udp, tcp, tftp, tftp-blocks, memcached, exchange, dsp", c.Kind)
	}
	if _, err := listenAddrs(c.Listen); err != nil {
		return err
	}
	if !nameRule.MatchString(c.Name) {
		return fmt.Errorf("serve: name %q: give one word of letters, digits, dots and dashes: the answers carry it", c.Name)
	}
	if c.Size < 0 || c.Interval < 0 {
		return errors.New("serve: size and interval must not be negative")
	}
	return nil
}

// Serve runs the server of the Config's kind until the context ends, which is
// no error.
func Serve(ctx context.Context, c Config) error {
	if err := c.Validate(); err != nil {
		return err
	}
	serve := map[string]func(context.Context, Config) error{
		HTTP: ServeHTTP, DNS: ServeDNS, Exchange: ServeExchange, DSP: ServeDSP, UDP: ServeUDP, TCP: ServeTCP, TFTP: ServeTFTP,
		Blocks: ServeBlocks, Memcached: ServeMemcached,
	}[c.Kind]
	err := serve(ctx, c)
	if err == nil || ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("serve %s on %s: %w", c.Kind, c.Listen, err)
}

// Main runs a server until SIGTERM or SIGINT, and writes readyLine to out when
// it listens.
func Main(c Config, out io.Writer) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	c.Ready = func() { fmt.Fprintln(out, readyLine) }
	return Serve(ctx, c)
}

const readyLine = "ready"
