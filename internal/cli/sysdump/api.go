package sysdump

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/diagnosis/sysdump"
)

// agentClient is a client of one agent's API.
type agentClient = nodev1alpha1connect.NodeServiceClient

// agentPart is a part of an agent's state, which its API returns.
type agentPart struct {
	file, about string
	write       func(ctx context.Context, agent agentClient, w io.Writer) error
}

// stateParts are small. trafficParts grow with the cluster, and come last in the archive:
// its size limit leaves them out first.
var (
	stateParts = []agentPart{
		{"status.json", "state of the agent", func(ctx context.Context, a agentClient, w io.Writer) error {
			resp, err := a.Status(ctx, &nodev1alpha1.StatusRequest{})
			return message(w, resp, err)
		}},
		{"drops.json", "packets that the agent's dataplanes refused or dropped, by reason",
			func(ctx context.Context, a agentClient, w io.Writer) error {
				resp, err := a.Drops(ctx, &nodev1alpha1.DropsRequest{})
				return message(w, resp, err)
			}},
		{"findings.json", "findings of 'spillway doctor' in the agent", func(ctx context.Context, a agentClient, w io.Writer) error {
			resp, err := a.Findings(ctx, &nodev1alpha1.FindingsRequest{})
			return message(w, resp, err)
		}},
	}
	trafficParts = []agentPart{
		{"flows.jsonl", fmt.Sprintf("flows of the kernel's table, at most %d", mostEntries), listFlows},
		{"services.jsonl", fmt.Sprintf("Services that the agent serves, at most %d", mostObjects), listServices},
	}
)

// message writes the response to a request.
func message(w io.Writer, m proto.Message, err error) error {
	if err != nil {
		return err
	}
	text, err := nodeclient.JSON(m)
	if err != nil {
		return err
	}
	return writeJSON(w, json.RawMessage(text))
}

// messageLine writes a message on one line.
func messageLine(w io.Writer, m proto.Message) error {
	text, err := nodeclient.JSON(m)
	if err != nil {
		return err
	}
	return writeLine(w, json.RawMessage(text))
}

func listFlows(ctx context.Context, a agentClient, w io.Writer) error {
	resp, err := a.ListFlows(ctx, &nodev1alpha1.ListFlowsRequest{Limit: mostEntries})
	if err != nil {
		return err
	}
	for _, f := range resp.Flows {
		if err := messageLine(w, f); err != nil {
			return err
		}
	}
	return nil
}

func listServices(ctx context.Context, a agentClient, w io.Writer) error {
	for req, n := (&nodev1alpha1.ListServicesRequest{}), 0; n < mostObjects; {
		resp, err := a.ListServices(ctx, req)
		if err != nil {
			return err
		}
		for _, s := range resp.Services {
			if err := messageLine(w, s); err != nil {
				return err
			}
		}
		n += len(resp.Services)
		if req.PageToken = resp.NextPageToken; req.PageToken == "" {
			return nil
		}
	}
	return nil
}

// apiCollectors returns those of the agent on this node.
func (n *node) apiCollectors() (list []sysdump.Collector) {
	for _, p := range append(stateParts[:len(stateParts):len(stateParts)], trafficParts...) {
		list = append(list, sysdump.Collector{File: "node/api/" + p.file, About: p.about, Collect: func(ctx context.Context, w io.Writer) error {
			agent := n.api.Dialer()
			var text bytes.Buffer
			err := p.write(ctx, nodeclient.New(agent), &text)
			_, writeErr := text.WriteTo(w)
			return cmp.Or(nodeclient.Error("read state", agent, err), writeErr)
		}})
	}
	return list
}

// apiCollectors returns those of these agents, part by part. Each has a connection of its own
// through the API server.
func (c *fromCluster) apiCollectors(agents []reach.Agent, parts []agentPart) (list []sysdump.Collector) {
	for _, p := range parts {
		for _, agent := range agents {
			list = append(list, sysdump.Collector{File: agentFilePart + agent.Node + "/" + p.file, About: p.about + " on " + agent.Node,
				Collect: func(ctx context.Context, w io.Writer) error {
					var text bytes.Buffer
					result := reach.Each(ctx, c.reach, []reach.Agent{agent}, func(ctx context.Context, d nodeclient.Dialer) (struct{}, error) {
						return struct{}{}, p.write(ctx, nodeclient.New(d), &text)
					})[0]
					_, err := text.WriteTo(w)
					if result.Err != nil {
						return result.Err
					}
					return err
				}})
		}
	}
	return list
}
