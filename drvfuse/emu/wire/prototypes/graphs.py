# SPDX-License-Identifier: Apache-2.0
"""Graphs."""

PROTOTYPES = """
// Graphs
cuGraphCreate(CUgraph* phGraph, unsigned int flags);
cuGraphDestroy(CUgraph hGraph);
cuGraphGetNodes(CUgraph hGraph, CUgraphNode* nodes[numNodes], inout size_t* numNodes);
cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode* rootNodes[numRootNodes], inout size_t* numRootNodes);
12: cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode* from_[numEdges], CUgraphNode* to[numEdges],
    CUgraphEdgeData* edgeData[numEdges], inout size_t* numEdges);
12: cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode* dependencies[numDependencies],
    CUgraphEdgeData* edgeData[numDependencies], inout size_t* numDependencies);
12: cuGraphGetEdges(CUgraph hGraph, CUgraphNode* from_[numEdges], CUgraphNode* to[numEdges], inout size_t* numEdges);
13: cuGraphGetEdges(CUgraph hGraph, CUgraphNode* from_[numEdges], CUgraphNode* to[numEdges],
    CUgraphEdgeData* edgeData[numEdges], inout size_t* numEdges);
12: cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode* dependencies[numDependencies],
    inout size_t* numDependencies);
13: cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode* dependencies[numDependencies],
    CUgraphEdgeData* edgeData[numDependencies], inout size_t* numDependencies);
cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType* type);
cuGraphInstantiateWithParams(CUgraphExec* phGraphExec, CUgraph hGraph,
    in CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams);
cuGraphInstantiate(CUgraphExec* phGraphExec, CUgraph hGraph, unsigned long long flags);
cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream);
cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream);
cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t* flags);
cuGraphExecDestroy(CUgraphExec hGraphExec);
"""
