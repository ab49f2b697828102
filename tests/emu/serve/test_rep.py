import numpy as np, drvfuse as df, pytest
def run_a_group(rank, size, seed, devs):
    rng = np.random.default_rng(seed + rank)
    host = [rng.standard_normal((5, 96), np.float32) for _ in range(2)]
    ds=[2*rank,2*rank+1] if devs else [0,1]
    with df.Group.local(ds) as group:
        xs = [member.array(a) for member, a in zip(group, host, strict=True)]
        back=[(x.numpy()==h).all() for x,h in zip(xs,host)]
        ys=df.allreduce(group,xs)
        out=[]
        for i,y in enumerate(ys):
            g=y.numpy(); bad=g!=host[0]+host[1]
            if bad.any(): out.append((rank,i,int(bad.sum()),np.argwhere(bad)[:3].tolist(), g[bad][:4].tolist(), back, [(np.array_equal(g[bad],h[bad])) for h in host]))
        return out
@pytest.mark.parametrize("i",range(12))
def test_it(pool,i):
    assert pool.run(2, run_a_group, 7, True, machine={"race": True}) == [[],[]]
    assert not pool.machine.reports
